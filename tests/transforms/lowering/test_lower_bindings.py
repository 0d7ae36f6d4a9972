"""Bindings take what their ops take, and give what these give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from hetu_fx.transforms.lowering.lower import FUNCTIONS, METHODS, by_bindings

aten = torch.ops.aten
X, Y, W, B = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(4)
HEADS = torch.randn(1, 2, 3, 4)

CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.add.Tensor: [((X, Y), {}), ((X, 2.0), {}), ((X, Y), {"alpha": 2})],
    aten.cat.default: [(([X, Y],), {}), (([X, Y], -1), {})],
    aten.contiguous.default: [((X.mT,), {}), ((HEADS,), {"memory_format": torch.channels_last})],
    aten.expand.default: [((X[:, :1], [2, 3, 4]), {}), ((X[:, :1], [-1, 3, -1]), {"implicit": False})],
    aten.gelu.default: [((X,), {}), ((X,), {"approximate": "tanh"})],
    aten.layer_norm.default: [((X, [4]), {}), ((X, [4], B, B, 1e-3), {}), ((X, [3, 4], None, None), {"eps": 1e-3})],
    aten.linear.default: [((X, W), {}), ((X, W, B), {})],
    aten.matmul.default: [((X, W), {})],
    aten.mean.dim: [((X, [-1], True), {}), ((X, [0, 2]), {"dtype": torch.float64}), ((X, None), {})],
    aten.mul.Tensor: [((X, Y), {}), ((X, 2), {})],
    aten.neg.default: [((X,), {})],
    aten.permute.default: [((X, [2, 0, 1]), {})],
    aten.pow.Tensor_Scalar: [((X, 2), {}), ((X.abs(), 0.5), {})],
    aten.reshape.default: [((X, [6, -1]), {})],
    aten.rsqrt.default: [((X.abs(),), {})],
    aten.scaled_dot_product_attention.default: [
        ((HEADS, HEADS, HEADS), {}),
        ((HEADS, HEADS, HEADS, None, 0.0, True), {}),
        ((HEADS, HEADS[:, :1], HEADS[:, :1], torch.ones(3, 3)), {"scale": 0.1, "enable_gqa": True}),
    ],
    aten.sub.Tensor: [((X, Y), {}), ((X, Y), {"alpha": 3})],
    aten.tanh.default: [((X,), {})],
    aten.to.dtype: [
        ((X, torch.bfloat16), {}),
        ((X, torch.float32, False, True), {}),
        ((X, torch.float64), {"copy": True}),
    ],
    aten.transpose.int: [((X, 0, -1), {})],
    aten.unsqueeze.default: [((X, 1), {})],
    aten.view.default: [((X, [6, 4]), {})],
}


def called(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """Return a module that calls an op with some arguments, of which tensors are its inputs."""
    graph = fx.Graph()
    given: list[Any] = []

    def node(value: Any) -> fx.Node:
        given.append(value)
        return graph.placeholder(f"x_{len(given)}")

    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, node, (args, kwargs))
    graph.output(graph.call_function(op, args, kwargs))
    module = fx.GraphModule(nn.Module(), graph)
    module.given = given
    return module


@pytest.mark.parametrize("op", [*METHODS, *FUNCTIONS], ids=str)
def test_a_binding_gives_what_its_op_gives(op: Any) -> None:
    for args, kwargs in CALLS[op]:
        module = called(op, args, kwargs)
        bound = by_bindings(module)
        run: Callable[..., Any] = bound.forward
        found, expected = run(*module.given), op(*args, **kwargs)
        assert all(node.target is not op for node in bound.graph.nodes)
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected)


def test_the_module_stays_as_it_is_and_other_ops_are_called_as_before() -> None:
    module = called(aten.relu.default, (X,), {})
    bound = by_bindings(module)
    assert [node.target for node in bound.graph.nodes] == [node.target for node in module.graph.nodes]
