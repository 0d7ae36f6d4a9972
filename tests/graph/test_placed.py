"""A graph that says "host" is put on a device: what it names, what it makes of nothing, and what runs on the host."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.placed import place_ops, placed_copy
from hetu_fx.transforms.rewrites.op_overrides import OpOverrides, Override
from tests.kinds.testkind import PLACE, calls, on_testkind

TOPK, SOFTMAX = "aten.topk.default", "aten.softmax.int"


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.softmax(self.head(x) + torch.arange(5.0, device=x.device), -1)
        values, places = scores.topk(2)
        return values.sum() + torch.full((), 2.0, device=x.device), places


def captured() -> tuple[nn.Module, Tensor, Graph]:
    torch.manual_seed(0)
    model, x = Chooses(), torch.randn(4, 6)
    return model, x, capture(model, (x,))


def run(graph: torch.fx.Graph, model: nn.Module, x: Tensor) -> list[Tensor]:
    weight, bias = model.parameters()
    return list(torch.fx.GraphModule(nn.Module(), graph)(weight, bias, x))


@on_testkind
def test_a_graph_runs_on_a_device_as_on_the_host() -> None:
    model, x, graph = captured()
    expected = run(copy.deepcopy(graph.graph), model, x)
    lacking = place_ops(graph.graph, PLACE)
    found = run(graph.graph, model.to(PLACE), x.to(PLACE))
    assert [value.device for value in found] == [PLACE, PLACE]
    assert all(torch.equal(made.cpu(), wanted) for made, wanted in zip(found, expected, strict=True))
    assert dict(lacking) == {TOPK: 1}


@on_testkind
def test_what_a_type_lacks_runs_on_the_host_and_nothing_else() -> None:
    model, x, graph = captured()
    place_ops(graph.graph, PLACE)
    calls.clear()
    run(graph.graph, model.to(PLACE), x.to(PLACE))
    assert "aten::topk" not in {name.partition(".")[0] for name in calls}
    assert any(name.startswith("aten::_softmax") for name in calls)


@on_testkind
def test_an_op_that_is_to_run_on_the_host_does_and_is_none_that_is_lacking() -> None:
    model, x, graph = captured()
    graph = Override(OpOverrides({SOFTMAX: "on host"}))(graph)
    assert dict(place_ops(graph.graph, PLACE)) == {TOPK: 1}
    calls.clear()
    run(graph.graph, model.to(PLACE), x.to(PLACE))
    assert not any(name.startswith("aten::_softmax") for name in calls)


def test_on_the_host_nothing_moves() -> None:
    _, _, graph = captured()
    before = [str(node.target) for node in graph.graph.nodes]
    assert not place_ops(Override(OpOverrides({SOFTMAX: "on host"}))(graph).graph, torch.device("cpu"))
    assert [str(node.target) for node in graph.graph.nodes] == before


@on_testkind
def test_a_copy_is_placed_and_the_graph_stays() -> None:
    model, x, graph = captured()
    before = str(graph.graph)
    copied = placed_copy(graph.graph, PLACE)
    copied.lint()
    assert str(graph.graph) == before
    assert run(copied, model.to(PLACE), x.to(PLACE))[0].device == PLACE
