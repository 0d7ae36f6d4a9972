"""A device graph becomes a function: the same numbers and gradients by every way of running it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from hetu_fx.errors import EnvironmentProblem
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.lowering.compiled import Compiled
from hetu_fx.transforms.lowering.lower import Backend, BlockCall, CompiledAhead, lower
from hetu_fx.transforms.lowering.recomputing_module import RecomputingModule
from hetu_fx.transforms.specialize.device_graph import DeviceGraph
from tests.transforms.lowering.recorder import Recorder
from tests.transforms.lowering.test_block_modules import WIDTH, Cut, Tower
from tests.transforms.plans import device_graph, program_of


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
