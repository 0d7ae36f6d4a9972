"""What depends on the batch, on parameters, and where gradients flow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.transforms.layouts.flow import Flow, build_flow

aten = torch.ops.aten


class Scaled(nn.Module):
    """A mask from the batch, a transposed weight, a product of both, and a detached copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> Any:
        product = (x > 0).to(x.dtype) @ self.weight.t()
        return (product * self.scale).sum() + product.detach().sin().sum() + torch.rand_like(product).cos().sum()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Scaled(), (torch.randn(4, 5),), training=True)


@pytest.fixture(scope="module")
def flow(graph: Graph) -> Flow:
    return build_flow(graph)


def node_of(graph: Graph, target: Any) -> fx.Node:
    return next(node for node in graph.graph.nodes if node.target is target)


def test_what_only_the_batch_reaches_belongs_to_no_stage(graph: Graph, flow: Flow) -> None:
    mask = node_of(graph, aten.gt.Scalar)
    assert flow.through_inputs(mask)
    assert not flow.is_mixed(mask)


def test_what_only_parameters_reach_belongs_to_no_stage(graph: Graph, flow: Flow) -> None:
    transposed = node_of(graph, aten.t.default)
    assert transposed in flow.parameters
    assert not flow.is_mixed(transposed)


def test_what_both_reach_belongs_to_a_stage(graph: Graph, flow: Flow) -> None:
    assert flow.is_mixed(node_of(graph, aten.matmul.default))
    assert flow.is_mixed(graph.output_values[0])


def test_gradients_stop_at_detach_and_at_what_is_not_floating_point(graph: Graph, flow: Flow) -> None:
    product, mask, sine = (node_of(graph, t) for t in (aten.matmul.default, aten.gt.Scalar, aten.sin.default))
    assert product in flow.differentiable
    assert mask not in flow.differentiable
    assert sine not in flow.differentiable


def test_no_gradient_flows_through_a_tensor_that_only_lends_its_shape(graph: Graph, flow: Flow) -> None:
    assert node_of(graph, aten.cos.default) not in flow.differentiable


def test_no_gradient_flows_through_frozen_parameters_alone(graph: Graph) -> None:
    flow = build_flow(graph, frozenset({"weight"}))
    leaves = {leaf.name: leaf.node for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    assert leaves["scale"] in flow.differentiable
    assert leaves["weight"] not in flow.differentiable
    assert node_of(graph, aten.matmul.default) not in flow.differentiable
