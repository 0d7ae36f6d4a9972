"""Checks become counts that add up over rows, where they ask for any element or all; any other has all rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph, OutputKind
from hetu_fx.transforms.rewrites.counts import MOST_COUNTED, CountChecks

aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")
Question = Callable[[Tensor], Tensor]


class Checked(nn.Module):
    """Raises where a question about its input, or its layer's output, is answered with yes."""

    def __init__(self, question: Question, *, of_input: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.question, self.of_input = question, of_input

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.question(x if self.of_input else h):
            raise ValueError("yes")
        return h.sum()


VALUES = [
    torch.tensor(values).reshape(2, 3)
    for values in ([0.0, 1, 2, 3, 4, 5], [-1.0, 1, 2, 3, 4, 5], [9.0] * 6, [0.0, 1, 2, 3, 4, NAN], [INF] * 6, [0.0] * 6)
]

ADDED = {
    "any": lambda v: (v < 0).any(),
    "any of a dim": lambda v: (v < 0).any(0).any(),
    "not all": lambda v: ~(v > -1).all(),
    "no bool": lambda v: v.any(),
    "either": lambda v: (v < 0).any() | (v > 8).any(),
    "not both": lambda v: torch.logical_not((v >= 0).all() & (v < 8).all()),
    "not below": lambda v: ~(v.max() < 5),
    "not up to": lambda v: ~(v.amax() <= 5),
    "not from": lambda v: ~(v.min() >= 0),
    "not above": lambda v: ~(v.amin() > -1),
    "a whole number from": lambda v: v.nan_to_num(0, 9).long().max() >= 5,
    "a whole number below": lambda v: v.nan_to_num(0, 9).long().min() < 0,
}
"""Questions whose answers are sums over rows."""

WHOLE = {
    "a mean": lambda v: v.mean() > 4,
    "a number from": lambda v: v.max() >= 5,
    "all": lambda v: (v > 0).all(),
    "none": lambda v: ~(v < 0).any(),
    "several": lambda v: (v < 2).sum() > 2,
}


def checks(graph: Graph) -> list[str]:
    return [leaf.name for leaf, _ in graph.outputs_of(OutputKind.CHECK)]


def count(graph: Graph, model: nn.Module, x: Tensor) -> int:
    """Return what a graph says of its one check."""
    state = dict(model.named_parameters())
    made = graph.module()(*(state.get(leaf.name, x) for leaf in graph.leaves))
    (found,) = (v for leaf, v in zip(graph.outputs, made, strict=True) if leaf.kind is OutputKind.CHECK)
    assert found.dtype is torch.int64
    return int(found)


@pytest.mark.parametrize("question", [*ADDED.values(), *WHOLE.values()], ids=[*ADDED, *WHOLE])
def test_a_count_is_more_than_zero_exactly_where_the_forward_raises(question: Question) -> None:
    model = Checked(question)
    graph = CountChecks()(capture(model, {"x": VALUES[0]}))
    for x in VALUES:
        assert (count(graph, model, x) > 0) is bool(question(model.layer(x))), x


@pytest.mark.parametrize("question", ADDED.values(), ids=ADDED)
def test_counts_of_some_rows_add_up(question: Question) -> None:
    model = Checked(question)
    graph = CountChecks()(capture(model, {"x": VALUES[0]}))
    for x in VALUES:
        assert count(graph, model, x) == sum(count(graph, model, row) for row in x.split(1)), x


@pytest.mark.parametrize("question", ADDED.values(), ids=ADDED)
def test_what_is_asked_of_inputs_is_known_before_the_step(question: Question) -> None:
    graph = CountChecks()(capture(Checked(question, of_input=True), {"x": VALUES[0]}))
    assert checks(graph) == []
    assert [leaf.name for leaf, _ in graph.outputs_of(OutputKind.COUNT)] == ["check_0"]


def test_what_is_asked_of_activations_or_of_all_rows_is_not() -> None:
    for model in (Checked(ADDED["any"]), *(Checked(question, of_input=True) for question in WHOLE.values())):
        assert checks(CountChecks()(capture(model, {"x": VALUES[0]}))) == ["check_0"]


class Many(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for bound in range(MOST_COUNTED + 2):
            if (x > bound + 10).any():
                raise ValueError(bound)
        return x.sum()


def test_few_counts_are_exchanged_before_a_step() -> None:
    graph = CountChecks()(capture(Many(), {"x": VALUES[0]}))
    assert len(graph.outputs_of(OutputKind.COUNT)) == MOST_COUNTED
    assert len(checks(graph)) == 2


def test_a_graph_without_checks_is_left_as_it_is() -> None:
    graph = capture(nn.Linear(3, 3), (VALUES[0],))
    assert CountChecks()(graph) is graph
