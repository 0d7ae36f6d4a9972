"""A device graph becomes a function: the same numbers and gradients by every way of running it."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.exc import InductorError, InvalidCxxCompiler

from hetu_fx.errors import EnvironmentProblem
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.lowering.lower import MOST_KNOWN, Backend, BlockCall, Compiled, CompiledAhead, lower
from hetu_fx.transforms.lowering.recomputing_module import RecomputingModule
from hetu_fx.transforms.specialize.device_graph import DeviceGraph
from tests.transforms.lowering.recorder import Recorder
from tests.transforms.lowering.test_block_modules import WIDTH, Cut, Tower
from tests.transforms.plans import device_graph, program_of

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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).sum()


@pytest.fixture(scope="module")
def device() -> DeviceGraph:
    return device_graph(program_of(Layer(), (torch.randn(4, 6),)), Plan.single(), 0, wants_values=True)


def gradient(function: Callable[..., Any], weight: Tensor, x: Tensor) -> Tensor:
    leaf = weight.clone().requires_grad_()
    (loss,) = function(leaf, x)
    (found,) = torch.autograd.grad(loss, leaf)
    return found


@pytest.mark.parametrize("backend", [None, "aot_eager", Recorder()], ids=["eager", "aot_eager", "compiler"])
def test_gradients_are_those_of_the_model_for_any_number_of_rows(device: DeviceGraph, backend: Backend) -> None:
    weight, function = torch.randn(5, 6), lower(RecomputingModule()(device), backend)
    for rows in (4, 7):
        x = torch.randn(rows, 6)
        expected = (1 - torch.tanh(x @ weight.t()) ** 2).t() @ x
        torch.testing.assert_close(gradient(function, weight, x), expected)


def test_a_compiler_gets_the_forward_and_the_backward_once_for_all_sizes(device: DeviceGraph) -> None:
    recorder = Recorder()
    function = lower(RecomputingModule()(device), recorder)
    for rows in (4, 7, 5):
        gradient(function, torch.randn(5, 6), torch.randn(rows, 6))
    assert len(recorder.graphs) == 2


def test_an_unknown_compiler_is_refused_with_what_there_is(device: DeviceGraph) -> None:
    with pytest.raises(
        EnvironmentProblem, match=r"compile='fast' is not known\nhint: use None, 'aot_eager', 'inductor'"
    ):
        lower(RecomputingModule()(device), "fast")


def test_a_compiled_backward_has_the_sum_of_gradients_beside_those_of_weights() -> None:
    graph, compiler = fx.Graph(), Recorder()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    given = x, [weight], [], "aten.linear.default", [0], 0, [], "", ""
    made = graph.call_function(torch.ops.hetu.gathered_products.default, given)
    graph.output((graph.call_function(operator.getitem, (made, 0)),))
    function = lower(fx.GraphModule(nn.Module(), graph), compiler)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((4, 6), (5, 6))]
    (y,) = function(*leaves)
    y.sum().backward()
    _, backward = (module.graph for module in compiler.graphs)
    found = [node.target for node in backward.nodes if node.op == "call_function"]
    assert torch.ops.hetu.gathered_products_backward.default in found
    torch.testing.assert_close(leaves[0].grad, leaves[1].sum(0).expand(4, 6))
    torch.testing.assert_close(leaves[1].grad, leaves[0].sum(0).expand(5, 6))


class Log:
    """A compiler, and what is around it, that write down what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def compiler(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.events.append("compiled")

        def run(*given: Any) -> Any:
            self.events.append("ran")
            return graph.forward(*given)

        return run

    @contextmanager
    def together(self) -> Iterator[None]:
        self.events.append("begin")
        yield
        self.events.append("end")


def ahead(cut: Cut, log: Log) -> CompiledAhead:
    compiled = {id(block): Compiled(block, log.compiler) for block in cut.blocks}  # type: ignore[arg-type]
    pieces = {name: BlockCall(block, compiled[id(block)]) for name, block in cut.cut.named_children()}  # type: ignore[arg-type]
    fixed = [slot.name in cut.parameters for slot in cut.device.slots]
    return CompiledAhead(fx.GraphModule(pieces, cut.cut.graph), fixed, log.together)


def test_all_is_compiled_together_at_the_first_call_and_for_other_sizes_no_more() -> None:
    log, made = Log(), Cut(Tower(8, 8, 8))
    function, start = ahead(made, log), ["begin", *["compiled"] * 3, "end"]
    for rows, before in ((4, start), (7, []), (5, [])):
        log.events.clear()
        made.gradients(function, torch.randn(rows, WIDTH))
        assert log.events == [*before, *["ran"] * 5]


def test_what_runs_without_gradients_first_is_compiled_together_too() -> None:
    log, made = Log(), Cut(Tower(8, 8))
    function = ahead(made, log)
    made.gradients(function, torch.randn(4, WIDTH))
    log.events.clear()
    with torch.no_grad():
        function(*(made.parameters.get(slot.name, torch.randn(4, WIDTH)) for slot in made.device.slots))
    assert log.events == ["begin", *["compiled"] * 3, "end", *["ran"] * 4]


def test_sizes_are_open_although_they_are_one_at_first() -> None:
    log, made, foreseen = Log(), Cut(Tower(8, 8)), ["begin", *["compiled"] * 3, "end"]
    function = ahead(made, log)
    for rows, before in ((1, foreseen), (4, foreseen), (7, []), (1, [])):
        log.events.clear()
        made.gradients(function, torch.randn(rows, WIDTH))
        assert log.events == [*before, *["ran"] * 4]


def test_a_piece_that_meets_other_inputs_than_foreseen_is_compiled_then() -> None:
    log, made = Log(), Cut(Tower(8, 8))
    function = ahead(made, log)
    made.gradients(function, torch.randn(4, WIDTH))
    log.events.clear()
    made.parameters = {name: value.requires_grad_(name != "head.bias") for name, value in made.parameters.items()}
    function(*(made.parameters.get(slot.name, torch.randn(4, WIDTH)) for slot in made.device.slots))
    assert log.events == [*["ran"] * 3, "compiled", "ran"]


def test_what_draws_is_compiled_once_whatever_tells_it_apart() -> None:
    log, made = Log(), Cut(Tower(8, 8, 8, p=0.4))
    made.gradients(ahead(made, log), torch.randn(4, WIDTH))
    assert log.events.count("compiled") == 3
