"""Rows may be sorted, counted and indexed shard by shard exactly where nothing sees the difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hetu_fx.deduction.factors.analyse import analyse
from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph

Tensor = torch.Tensor
X, IDS = torch.randn(6, 4), torch.randint(0, 3, (6,))


def of(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Graph, FactorMap]:
    class Function(nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return function(*inputs)

    graph = capture(Function(), inputs, training=False)
    return graph, analyse(graph)


def ops_where_rows_are_whole(function: Callable[..., Tensor], *inputs: Tensor) -> set[str]:
    graph, factors = of(function, *inputs)
    return {
        str(node.target).split(".")[1]
        for node in graph.graph.nodes
        if factors.is_op(node) and any(cls.is_batch for cls in factors.op(node).whole)
    }


def test_rows_of_a_mask_are_taken_by_count_though_its_columns_are_counted_along_another_size() -> None:
    def masked(ids: Tensor, mask: Tensor) -> Tensor:
        rows, columns = torch.arange(ids.size(0)), torch.arange(ids.size(1))
        return ids * mask[rows[:, None], columns[None]] + (columns > 1)

    ids = torch.ones(6, 5)
    assert ops_where_rows_are_whole(masked, ids, torch.ones(6, 9)) == set()


def there_and_back(x: Tensor, ids: Tensor) -> Tensor:
    order = ids.argsort()
    return (x[order] * 2)[order.argsort()]


def put_back(x: Tensor, ids: Tensor) -> Tensor:
    order = ids.sort()[1]
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0))
    return x[order].relu()[back]


def added_back(x: Tensor, ids: Tensor) -> Tensor:
    order = ids.argsort()
    return torch.zeros_like(x).index_add(0, order, x[order] * 2)


def slots(x: Tensor, ids: Tensor) -> Tensor:
    flat = torch.stack([ids, ids + 1], 1).reshape(-1)
    order = flat.argsort()
    return torch.zeros_like(x).index_add(0, order // 2, x[order // 2])


def own_rows(x: Tensor, ids: Tensor) -> Tensor:
    return x[torch.arange(x.size(0))] + 1


@pytest.mark.parametrize("function", [there_and_back, put_back, added_back, slots, own_rows])
def test_rows_that_are_put_back_pass_through(function: Callable[..., Tensor]) -> None:
    assert ops_where_rows_are_whole(function, X, IDS) == set()


@pytest.mark.parametrize("function", [there_and_back, put_back, added_back, slots, own_rows])
def test_the_program_on_some_of_the_rows_gives_those_rows(function: Callable[..., Tensor]) -> None:
    whole = function(X, IDS)
    for rows in (slice(0, 4), slice(4, 6)):
        torch.testing.assert_close(function(X[rows], IDS[rows]), whole[rows])


def sorted_output(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids.argsort()]


def positions_as_numbers(x: Tensor, ids: Tensor) -> Tensor:
    return x * ids.argsort()[:, None]


def mixed_orders(x: Tensor, ids: Tensor) -> Tensor:
    order = ids.argsort()
    return (x[order] + x)[order.argsort()]


def across_sorted_rows(x: Tensor, ids: Tensor) -> Tensor:
    order = ids.argsort()
    return x[order].cumsum(0)[order.argsort()]


def two_sorts(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids.argsort()][(-ids).argsort().argsort()]


def shifted(x: Tensor, ids: Tensor) -> Tensor:
    return x[(torch.arange(x.size(0)) + 1) % x.size(0)]


def compared_positions(x: Tensor, ids: Tensor) -> Tensor:
    rows = torch.arange(x.size(0))
    return x[rows] * (rows > 2)[:, None]


MISUSES = [
    sorted_output,
    positions_as_numbers,
    mixed_orders,
    across_sorted_rows,
    two_sorts,
    shifted,
    compared_positions,
]


@pytest.mark.parametrize("function", MISUSES)
def test_rows_that_anything_else_sees_stay_whole(function: Callable[..., Tensor]) -> None:
    assert ops_where_rows_are_whole(function, X, IDS) & {"sort", "argsort", "arange"}


@pytest.mark.parametrize("function", MISUSES)
def test_nothing_is_in_shard_order_after_a_misuse(function: Callable[..., Tensor]) -> None:
    _, factors = of(function, X, IDS)
    assert factors.shard_ordered == frozenset()


def test_the_slots_of_a_row_cannot_be_cut() -> None:
    _, factors = of(slots, X, IDS)
    assert [cls.size for cls in factors.pinned] == [2]


def test_a_matrix_is_sorted_within_rows_and_rows_pass() -> None:
    graph, factors = of(lambda x: x.sort(1)[0] + 1, X)
    op = next(factors.op(node) for node in graph.graph.nodes if "sort" in str(node.target))
    assert [cls.hint for cls in op.whole] == [4]


def same_document(x: Tensor) -> Tensor:
    """Mask as for packed sequences: document numbers, counted from positions, taken row by row and compared."""
    rows, length = x.shape
    positions = torch.arange(length).expand(rows, -1)
    documents = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    row, place = torch.arange(rows)[:, None, None], torch.arange(length)
    same = documents[row, place[:, None]] == documents[row, place[None, :]]
    return same & (positions[row, place[None, :]] <= positions[row, place[:, None]])


def test_numbers_taken_row_by_row_may_be_compared() -> None:
    assert ops_where_rows_are_whole(same_document, torch.randn(6, 5)) == set()


def allowed(x: Tensor, ids: Tensor) -> Tensor:
    """A causal mask over keys that count: positions are compared, rows only pointed at."""
    rows = torch.arange(x.size(0))[:, None, None]
    query, key = torch.arange(x.size(1))[None, :, None], torch.arange(x.size(1))[None, None, :]
    return (key <= query) & (x > 0)[rows, key]


def test_positions_that_are_compared_do_no_harm_to_rows_that_are_pointed_at() -> None:
    assert ops_where_rows_are_whole(allowed, torch.randn(6, 5), IDS) == set()


def test_what_an_op_that_is_not_looked_at_does_with_rows_is_not_believed() -> None:
    graph, factors = of(lambda x, ids: x * ids[ids.argsort()][:, None], X, IDS)
    argsort = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.argsort.default)
    seen = [node for node in graph.graph.nodes if node is argsort or node.op == "placeholder"]
    assert factors.op(argsort).rows_meet
    assert analyse(graph, seen).op(argsort).rows_meet
