"""Forwards that compare the number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor, nn

from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph


class Compares(nn.Module):
    """Calls a function of rows of 6 numbers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(x)).square().mean()


def captured(function: Callable[[Tensor], Tensor], rows: int = 8) -> Graph:
    return capture(Compares(function), {"x": torch.randn(rows, 6)})


def takes(graph: Graph, rows: int) -> bool:
    assert graph.batch_symbol is not None
    return all(one.subs(graph.batch_symbol, rows) is not sympy.false for one in graph.conditions)


@pytest.mark.parametrize(
    ("function", "taken", "others"),
    [
        (lambda x: x * 2 if x.shape[0] >= 10 else x * 3, (8, 9), (10, 70)),
        (lambda x: x * 2 if 4 < x.shape[0] <= 9 else x * 3, (5, 9), (3, 10)),
        (lambda x: x * 2 if len(x) < 10 else x * 3, (3, 9), (10, 11)),
        (lambda x: x * 2 if x.shape[0] % 2 == 0 else x * 3, (8, 10), (7, 9)),
        (lambda x: x[::2] - x[1::2] if x.shape[0] % 2 == 0 else x, (8, 10), (7, 9)),
        (lambda x: x * 2 if x.shape[0] != 9 else x * 3, (8, 10), (9,)),
        (lambda x: x.reshape(2, -1, 6).mean(0), (8, 10), (7, 9)),
    ],
    ids=["from ten on", "a band", "len", "even", "pairs", "not nine", "two halves"],
)
def test_a_graph_holds_for_the_numbers_of_rows_for_which_comparisons_come_out_alike(
    function: Callable[[Tensor], Tensor], taken: tuple[int, ...], others: tuple[int, ...]
) -> None:
    graph = captured(function)
    assert [takes(graph, rows) for rows in (*taken, *others)] == [True] * len(taken) + [False] * len(others)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.contiguous() if x.shape[0] >= 64 else x,
        lambda x: torch.relu(x) if x.shape[0] > 5 else x.relu(),
    ],
    ids=["contiguous", "relu"],
)
def test_a_comparison_that_makes_no_difference_is_forgotten(function: Callable[[Tensor], Tensor]) -> None:
    graph = captured(function)
    assert all(takes(graph, rows) for rows in (2, 3, 5, 8, 9, 63, 64, 4096)), graph.conditions


def test_what_differs_in_a_number_alone_is_a_difference() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * (torch.tensor([1.0, 2.0]) if x.shape[0] < 10 else torch.tensor([1.0, 3.0]))[1]

    graph = captured(scaled)
    assert takes(graph, 9)
    assert not takes(graph, 10)


def test_a_number_of_rows_that_must_be_the_examples_is_fixed() -> None:
    graph = captured(lambda x: x * 2 if x.shape[0] == 8 else x * 3)
    assert graph.batch_symbol is None
