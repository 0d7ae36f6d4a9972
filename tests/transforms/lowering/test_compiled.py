"""A graph is compiled once for all inputs that it fits, anew where it does not, and gives the same numbers always."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.exc import InductorError, InvalidCxxCompiler

from hetu_fx.transforms.lowering.compiled import MOST_KNOWN, Compiled
from hetu_fx.transforms.lowering.lower import lower
from tests.transforms.lowering.recorder import Recorder

aten = torch.ops.aten


def module_of(num_inputs: int, make: Callable[..., Sequence[Any]]) -> fx.GraphModule:
    """Return a module whose results are made by `make` of a graph and its inputs."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"input_{number}") for number in range(num_inputs)]
    graph.output(tuple(make(graph, *inputs)))
    return fx.GraphModule(nn.Module(), graph)


def product(graph: fx.Graph, x: fx.Node, weight: fx.Node) -> Sequence[Any]:
    return [graph.call_function(aten.tanh.default, (graph.call_function(aten.linear.default, (x, weight)),))]


def check(function: Callable[..., Any], x: Tensor, weight: Tensor) -> None:
    """Compare with torch, values and gradients."""
    given = [t.detach().requires_grad_() for t in (x, weight)]
    expected = torch.tanh(nn.functional.linear(*given))
    (found,) = function(*given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, given, cotangent), torch.autograd.grad(expected, given, cotangent)
    )


def test_open_sizes_share_one_graph_but_for_sizes_of_one_and_none() -> None:
    recorder, weight = Recorder(), torch.randn(5, 6).double()
    function = lower(module_of(2, product), recorder, [False, True])
    for rows, graphs in ((4, 2), (7, 2), (1, 4), (9, 4), (1, 4), (0, 6)):
        check(function, torch.randn(rows, 6).double(), weight)
        assert len(recorder.graphs) == graphs, f"a forward and a backward for each kind, at {rows} rows"


def test_fixed_sizes_have_a_graph_of_their_own() -> None:
    recorder = Recorder()
    function = lower(module_of(2, product), recorder, [False, True])
    for width, graphs in ((5, 2), (8, 4), (5, 4)):
        check(function, torch.randn(3, 6).double(), torch.randn(width, 6).double())
        assert len(recorder.graphs) == graphs


@pytest.mark.parametrize("rows", [4, 1])
def test_inputs_of_any_strides_are_taken(rows: int) -> None:
    recorder, weight = Recorder(), torch.randn(5, 6).double()
    function = lower(module_of(2, product), recorder, [False, True])
    x = torch.randn(6, 2 * rows).double()
    for given in (
        x[:, :rows].t(),
        x[:, ::2].t(),
        torch.randn(rows, 12).double()[:, 3:9],
        x[0].expand(6, -1)[:, :rows].t(),
    ):
        check(function, given, weight)


def test_what_sizes_were_found_to_be_is_asked_of_other_sizes() -> None:
    def halves(graph: fx.Graph, x: fx.Node) -> Sequence[Any]:
        return [graph.call_function(aten.reshape.default, (x, [-1, 2]))]

    recorder = Recorder()
    function = lower(module_of(1, halves), recorder)
    for rows in (4, 6):
        assert function(torch.arange(rows))[0].tolist() == torch.arange(rows).reshape(-1, 2).tolist()
    assert len(recorder.graphs) == 1
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        function(torch.arange(5))


def test_without_gradients_there_is_no_backward() -> None:
    recorder, (x, weight) = Recorder(), (torch.randn(4, 6).double(), torch.randn(5, 6).double())
    function = lower(module_of(2, product), recorder)
    with torch.no_grad():
        (found,) = function(x, weight.requires_grad_())
    assert not found.requires_grad
    assert len(recorder.graphs) == 1
    check(function, x, weight)
    assert len(recorder.graphs) == 3


def test_inference_mode_is_taken_before_and_after_training() -> None:
    function, x, weight = lower(module_of(2, product), "aot_eager"), torch.randn(4, 6), torch.randn(5, 6)
    for rows in (4, 3):
        with torch.inference_mode():
            (found,) = function(x[:rows].clone(), weight.clone())
        torch.testing.assert_close(found, torch.tanh(x[:rows] @ weight.t()))
        with torch.no_grad():
            torch.testing.assert_close(function(x[:rows], weight)[0], torch.tanh(x[:rows] @ weight.t()))
        check(function, x[:rows].double(), weight.double())


def test_numbers_are_inputs_and_other_constants_part_of_the_graph() -> None:
    def moved(graph: fx.Graph, x: fx.Node, shift: fx.Node, scale: fx.Node) -> Sequence[Any]:
        return [graph.call_function(aten.mul.Tensor, (graph.call_function(aten.add.Tensor, (x, shift)), scale)), shift]

    recorder = Recorder()
    function, x = lower(module_of(3, moved), recorder), torch.arange(4.0)
    for shift, scale, graphs in ((0, 2.0, 1), (1, 2.0, 1), (5, 2.0, 1), (5, 3.0, 2)):
        found = function(x, shift, scale)
        torch.testing.assert_close(found[0], (x + shift) * scale)
        assert found[1] == shift
        assert len(recorder.graphs) == graphs


def test_sizes_may_be_told_by_values() -> None:
    def pairs(graph: fx.Graph, x: fx.Node) -> Sequence[Any]:
        chosen = graph.call_function(aten.masked_select.default, (x, graph.call_function(aten.gt.Scalar, (x, 0))))
        return [graph.call_function(aten.reshape.default, (chosen, [-1, 2]))]

    recorder = Recorder()
    function = lower(module_of(1, pairs), recorder)
    for x in (torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-1.0, -2.0]), torch.ones(4)):
        torch.testing.assert_close(function(x)[0], x[x > 0].reshape(-1, 2))
    assert len(recorder.graphs) == 1


def test_what_is_remembered_of_inputs_is_bounded() -> None:
    recorder = Recorder()
    compiled = Compiled(module_of(2, product), lambda graph, inputs: recorder(graph, list(inputs)))
    weight = torch.randn(2, 2)
    for rows in range(2, MOST_KNOWN + 5):
        compiled((torch.zeros(rows, 2), weight), [(0,), ()])
    assert len(recorder.graphs) == 1
    assert len(compiled._calls) <= MOST_KNOWN


def failing(error: Exception) -> Compiled:
    def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise error

    return Compiled(module_of(2, product), compiler)


def test_what_torch_cannot_part_runs_uncompiled_and_is_told_once() -> None:
    compiled = failing(AssertionError("Node add_3 was invalid, but is output"))
    with pytest.warns(UserWarning, match=r"fails to compile .* shapes \(1, 6\)(.|\n)*hint: "):
        check(lambda *given: compiled(given, [[0], []]), torch.randn(1, 6).double(), torch.randn(5, 6).double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(lambda *given: compiled(given, [[0], []]), torch.randn(1, 6).double(), torch.randn(5, 6).double())


@pytest.mark.parametrize(
    "error",
    [AssertionError("something else"), TypeError("ours"), InductorError(InvalidCxxCompiler("c++"), None)],
    ids=["another assertion", "an error of ours", "no compiler"],
)
def test_what_else_a_compiler_fails_with_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        failing(error)((torch.randn(1, 6), torch.randn(5, 6)), [[0], []])


def test_what_torch_cannot_compile_at_open_sizes_is_compiled_for_those_that_come() -> None:
    recorder, weight = Recorder(), torch.randn(5, 6).double()

    def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if any(isinstance(size, torch.SymInt) for size in inputs):
            raise InductorError(TypeError("cannot determine truth value of Relational: 16*s13*s48 < 16"), None)
        return recorder(graph, inputs)

    function = lower(module_of(2, product), compiler, [False, True])
    for rows, graphs in ((4, 2), (7, 4), (4, 4)):
        check(function, torch.randn(rows, 6).double(), weight)
        assert len(recorder.graphs) == graphs, f"a forward and a backward for each size, at {rows} rows"
