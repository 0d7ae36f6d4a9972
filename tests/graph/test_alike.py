"""Calls that look alike share their example value; those that may differ do not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.capture import capture
from hetu_fx.graph.edit import alike_call, insert

aten = torch.ops.aten


class TwoTensors(torch.nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second.t()


@pytest.fixture
def graph() -> fx.Graph:
    batch = {"first": torch.randn(4, 4), "second": torch.randn(4, 4)}
    return capture(TwoTensors(), batch, training=False).graph


def added(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    return insert(graph.output_node(), target, *args)


def leaves(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def test_the_same_op_on_tensors_of_one_shape_is_alike(graph: fx.Graph) -> None:
    first, _ = leaves(graph)
    one, other = added(graph, aten.relu.default, first), added(graph, aten.relu.default, first)
    assert alike_call(other) is one
    assert meta.value(other) is meta.value(one)


def test_what_an_op_gives_is_the_same_with_and_without_an_alike_call(graph: fx.Graph) -> None:
    first, _ = leaves(graph)
    reused = added(graph, aten.softmax.int, added(graph, aten.softmax.int, first, -1), -1)
    shape, dtype = meta.shape(reused), meta.dtype(reused)
    computed = meta.infer(reused)
    assert (tuple(computed.shape), computed.dtype) == (shape, dtype)


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (1, 2)])
def test_constants_that_differ_in_type_or_value_are_not_alike(graph: fx.Graph, one: Any, other: Any) -> None:
    first, _ = leaves(graph)
    added(graph, aten.mul.Tensor, first, one)
    assert alike_call(added(graph, aten.mul.Tensor, first, other)) is None


def test_tensors_that_lie_differently_in_memory_are_not_alike(graph: fx.Graph) -> None:
    first, _ = leaves(graph)
    turned = added(graph, aten.t.default, first)
    added(graph, aten.clone.default, first)
    assert alike_call(added(graph, aten.clone.default, turned)) is None


def test_sizes_that_only_a_batch_tells_are_another_for_every_call(graph: fx.Graph) -> None:
    first, _ = leaves(graph)
    added(graph, aten.nonzero.default, first)
    assert alike_call(added(graph, aten.nonzero.default, first)) is None


def test_numbers_computed_from_sizes_are_alike_if_their_expressions_are(graph: fx.Graph) -> None:
    first, second = leaves(graph)
    rows, columns = (added(graph, aten.sym_size.int, leaf, 0) for leaf in (first, second))
    one = added(graph, operator.mul, rows, 2)
    twice, thrice = added(graph, operator.mul, rows, 2), added(graph, operator.mul, columns, 3)
    assert alike_call(twice) is one
    assert alike_call(thrice) is None
