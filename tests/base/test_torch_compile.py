"""Graphs are traced with open sizes; what is found out of them is a condition on other sizes."""

from __future__ import annotations

import torch
from torch import fx, nn

from hetu_fx.base.torch_compile import Symbols


def test_what_was_found_of_open_sizes_is_asked_of_others() -> None:
    symbols = Symbols()
    rows, tokens, width = symbols.size(4), symbols.size(6), symbols.size(6)
    assert tokens == width
    assert rows * tokens < 100
    holds = symbols.condition([rows, tokens, width])
    assert [holds(sizes) for sizes in ((4, 6, 6), (9, 11, 11), (9, 12, 12), (4, 6, 7), (1, 6, 6))] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_nothing_found_is_no_condition_for_numbers() -> None:
    symbols = Symbols()
    holds = symbols.condition([symbols.number(0), symbols.number(1), symbols.number(7)])
    assert all(holds(numbers) for numbers in ((0, 1, 7), (5, 0, -3), (1, 1, 1)))


def test_a_graph_is_run_without_numbers() -> None:
    graph, symbols = fx.Graph(), Symbols()
    graph.output(graph.call_function(torch.ops.aten.t.default, (graph.placeholder("x"),)))
    rows = symbols.size(4)
    x = symbols.tensor((rows, 3), (3, 1), True, dtype=torch.float64)
    made = symbols.run(fx.GraphModule(nn.Module(), graph), [x])
    assert made.shape == (3, rows)
    assert made.stride() == (1, 3)
    assert made.requires_grad
    assert made.dtype == torch.float64


def test_transforms_of_open_sizes_are_run_without_numbers() -> None:
    graph, symbols = fx.Graph(), Symbols()
    graph.output(graph.call_function(torch.ops.aten.fft_rfftn.default, (graph.placeholder("x"), None, [-2, -1])))
    rows = symbols.size(4)
    x = symbols.tensor((rows, 6, 8), (48, 8, 1), True, dtype=torch.float64)
    made = symbols.run(fx.GraphModule(nn.Module(), graph), [x])
    assert made.shape == (rows, 6, 5)
    assert made.dtype == torch.complex128
