"""A model that fixes its batch runs on every replica as a whole: its inputs are gathered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.graph import meta
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import FixedRows, LeafKind
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.transforms.rewrites.fixed_rows import gather_inputs
from hetu_fx.transforms.rewrites.row_ops import PLACE

PLANS = {
    "3:1": Plan.data_parallel((0, 1), (3, 1)),
    "a replica without rows": Plan.data_parallel((0, 1), (7, 1)),
    "[0,1] beside [2]": Plan((Pipeline((Stage((0, 1)),)), Pipeline((Stage((2,)),)))),
    "tensor parallel": Plan.tensor_parallel((0, 1)),
}


class Fixed(nn.Module):
    """Sums of 2 rows each, told apart by a mask, less their deviation over all; the batch must have 4 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        pairs = x.reshape(2, 2, 6).sum(1)
        h = self.layer(pairs).tanh() * scale - self.layer(x[mask.argsort(stable=True)]).std()
        self.seen += h.detach().mean(0)
        return nn.functional.cross_entropy(h, labels[:2]) + nn.functional.cross_entropy(h, labels[2:])


def batch_of(rows: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(rows, 6, dtype=torch.float64),
        "mask": torch.arange(rows) % 3 == 0,
        "labels": torch.randint(0, 8, (rows,)),
        "scale": torch.rand(8, dtype=torch.float64),
    }


@pytest.mark.parametrize("name", PLANS)
def test_a_fixed_batch_trains_as_on_one_device(name: str) -> None:
    torch.manual_seed(1)
    model, batches, how = Fixed(), [batch_of(4), batch_of(4)], Lockstep()
    made = how.train(model, batches, PLANS[name])
    verdict = judge("", train_alone(model, batches, how), made, 1e-10, "")
    assert verdict.verdict == "equal", verdict


def test_inputs_have_a_replica_s_rows_and_what_reads_them_has_all() -> None:
    given = capture(Fixed(), batch_of(4))
    assert given.fixed_rows == FixedRows(4, {"x": 0, "mask": 0, "labels": 0})
    graph = gather_inputs(given)
    assert {leaf.name: leaf.row_dim for leaf in graph.leaves_of(LeafKind.INPUT)} == {
        "x": 0, "mask": 0, "labels": 0, "scale": None,
    }  # fmt: skip
    placed = [node for node in graph.graph.nodes if node.target is PLACE]
    assert [meta.shape(node)[0] for node in placed] == [4, 4, 4]
    assert not graph.takes_any_rows
    assert given.batch_symbol is None, "what a pass is given stays as it was"


class OfAnySize(Fixed):
    """The same for any even number of rows, which the graph fixes all the same."""

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        half = int(x.shape[0]) // 2
        pairs = torch.stack([x[i] + x[half + i] for i in range(half)])
        return nn.functional.cross_entropy(self.layer(pairs) * scale, labels[:half])


def test_a_batch_of_another_size_has_a_graph_of_its_own() -> None:
    torch.manual_seed(2)
    model, batches, how = OfAnySize(), [batch_of(4), batch_of(6), batch_of(4)], Lockstep()
    made = how.train(model, batches, PLANS["3:1"])
    assert judge("", train_alone(model, batches, how), made, 1e-10, "").verdict == "equal"


@pytest.mark.parametrize("name", PLANS)
def test_ranks_may_bring_rows_of_their_own(name: str) -> None:
    torch.manual_seed(2)
    model, batches, how = OfAnySize(), [batch_of(4), batch_of(6), batch_of(4)], Lockstep(ranks=3, rows=(3, 1, 100))
    made = how.train(model, batches, PLANS[name])
    assert judge("", train_alone(model, batches, how), made, 1e-10, "").verdict == "equal"
