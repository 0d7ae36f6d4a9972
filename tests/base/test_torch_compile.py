"""Graphs are traced with open sizes; what is found out of them is a condition on other sizes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from hetu_fx.base import torch_compile
from hetu_fx.base.torch_compile import Symbols, by_inductor, one_library
from hetu_fx.errors import EnvironmentProblem

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    torch.compiler.reset()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many kernels each library is made of."""
    found, stock = list[int](), torch_compile._build

    def build(kernels: Any) -> None:
        found.append(len(kernels))
        stock(kernels)

    monkeypatch.setattr(torch_compile, "_build", build)
    return found


def graph_of(op: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(aten.sum.dim_IntList, (graph.call_function(op, (x,)), [1]))
    graph.output((graph.call_function(aten.exp.default, (total,)),))
    return fx.GraphModule(nn.Module(), graph)


def compiled(op: Any) -> Any:
    symbols = Symbols()
    with symbols.tracing():
        return by_inductor(graph_of(op), [symbols.tensor((3, 40), (40, 1), True, dtype=torch.float64)])


def check(function: Any, torch_function: Any) -> None:
    x = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
    (found,), expected = function(x), torch_function(x).sum(1).exp()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_kernels_of_several_graphs_are_one_library_which_the_next_finds(builds: list[int]) -> None:
    with one_library():
        with one_library():
            first = compiled(aten.tanh.default)
        second = compiled(aten.sigmoid.default)
        assert builds == []
    assert len(builds) == 1
    assert builds[0] >= 4, "a forward and a backward each"
    check(first, torch.tanh)
    check(second, torch.sigmoid)
    torch.compiler.reset()
    with one_library():
        again = compiled(aten.tanh.default)
    assert len(builds) == 1, "it is there, from the disk"
    check(again, torch.tanh)


def test_what_was_compiled_before_an_error_works(builds: list[int]) -> None:
    made = []

    def fail_late() -> None:
        with one_library():
            made.append(compiled(aten.tanh.default))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_late()
    check(made[0], torch.tanh)
    assert len(builds) == 1


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: str(broken))
    torch_compile._compiler.cache_clear()
    try:
        with pytest.raises(EnvironmentProblem, match=r"g\+\+ -mcpu=native .* failed: no such luck\nhint: .* CXX"):
            torch_compile._compiler()
    finally:
        torch_compile._compiler.cache_clear()


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
