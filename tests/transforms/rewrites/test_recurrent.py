"""Dropout between recurrent layers is drawn by counter; without it, layers one by one make what all make at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.graph.capture import capture
from hetu_fx.lockstep import Lockstep
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.rewrites.counter_rng import Randomness
from tests.graph.compare import assert_same_as_eager

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Recurrent(nn.Module):
    def __init__(self, kind: str, dropout: float, both_ways: bool = False) -> None:
        super().__init__()
        self.layers = KINDS[kind](3, 4, num_layers=2, dropout=dropout, batch_first=True, bidirectional=both_ways)

    def forward(self, x: Tensor) -> Tensor:
        values, states = self.layers(x)
        last = states[1] if isinstance(states, tuple) else states
        return values.square().mean() + last.square().mean()


@pytest.mark.parametrize(("kind", "both_ways"), [("lstm", False), ("gru", True), ("rnn", False)])
def test_layers_one_by_one_make_what_all_make_at_once(kind: str, both_ways: bool) -> None:
    graph = Randomness()(capture(Recurrent(kind, 1e-15, both_ways), (torch.randn(5, 4, 3),)))
    assert not graph.notes
    assert sum("input" in str(node.target) for node in graph.graph.nodes if node.op == "call_function") == 2
    model, batch = Recurrent(kind, 0.0, both_ways).double(), (torch.randn(3, 4, 3, dtype=torch.float64),)
    assert_same_as_eager(model, graph, batch, 1e-12, {"random_state": torch.tensor([7, 0, 0])})


def test_layers_without_dropout_stay_one_op_and_draw_nothing() -> None:
    graph = Randomness()(capture(Recurrent("gru", 0.0), (torch.randn(5, 4, 3),)))
    assert not graph.notes
    assert sum("input" in str(node.target) for node in graph.graph.nodes if node.op == "call_function") == 1


def test_dropout_between_layers_is_the_same_under_every_plan() -> None:
    torch.manual_seed(0)
    model, batches, how = Recurrent("rnn", 0.4).double(), [(torch.randn(8, 4, 3, dtype=torch.float64),)] * 2, Lockstep()
    alone, made = (how.train(model, batches, plan) for plan in (Plan.single(0), Plan.data_parallel((0, 1), (3, 1))))
    assert judge("rows", alone, made, 1e-10, "").verdict == "equal"
