"""Runs a captured graph op by op on the values of its leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from hetu_fx.base.device_types import HOST
from hetu_fx.base.torch_private import OpOverload, tree_leaves, tree_map
from hetu_fx.errors import AlignError
from hetu_fx.graph import meta
from hetu_fx.graph.bind import Batch, input_tensors
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.graph.placed import place_ops
from hetu_fx.transforms.rewrites.counter_rng import Randomness
from hetu_fx_align.call import Call

SEED = 0
Values = Mapping[fx.Node, Any]
Visit = Callable[[fx.Node, tuple[Any, ...], Mapping[str, Any]], Any]
"""Runs an op node on the values of its arguments."""


def graph_to_align(model: nn.Module, batch: Batch) -> Graph:
    """Capture a model; random ops draw by counter, so that they draw the same in every way of running them.

    Raises:
        CaptureError: the model cannot be captured.
        AlignError: it returns no loss.
    """
    graph = capture(model, batch, training=model.training)
    if graph.loss is None:
        raise AlignError(
            "the model returns no loss: a number that needs a gradient, the only one or named 'loss'\n"
            "hint: return the loss from forward"
        )
    drawn = Randomness()(graph)
    place_ops(drawn.graph, next((parameter.device for parameter in model.parameters()), HOST))
    return drawn


def values_of_leaves(graph: Graph, model: nn.Module, batch: Batch) -> dict[fx.Node, Tensor]:
    """Return the values that a graph's leaves have in a batch; parameters that are trained ask for gradients."""
    inputs = input_tensors(graph, batch)
    find: dict[LeafKind, Callable[[str], Tensor]] = {
        LeafKind.INPUT: inputs.__getitem__,
        LeafKind.PARAMETER: model.get_parameter,
        LeafKind.BUFFER: model.get_buffer,
        LeafKind.CONSTANT: graph.constants.__getitem__,
        LeafKind.RANDOM_STATE: lambda _: torch.tensor([SEED, 0, 0]),
    }
    found = {leaf.node: find[leaf.kind](leaf.name) for leaf in graph.leaves}
    return {node: value.detach().requires_grad_(value.requires_grad) for node, value in found.items()}


def interpret(graph: Graph, leaves: Mapping[fx.Node, Any], visit: Visit) -> dict[fx.Node, Any]:
    """Return the values of all nodes; `visit` runs each op, of nodes that make tensors."""
    values: dict[fx.Node, Any] = dict(leaves)
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = tree_map(
            lambda item: values[item] if isinstance(item, fx.Node) else item, (node.args, node.kwargs)
        )
        assert callable(node.target)
        values[node] = visit(node, args, kwargs) if is_op(node) else node.target(*args, **kwargs)
    return values


def is_op(node: fx.Node) -> bool:
    """Tell whether a node calls an op of torch that makes tensors; others take tuples apart and count sizes."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(meta.value(node)))


def module_of_node(node: fx.Node) -> str:
    """Return the name of the innermost module around a node, "" for the model itself."""
    stack = meta.module_stack(node)
    return stack[-1][0] if stack else ""


def call_of(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Return the call that a node makes with these values."""
    assert isinstance(node.target, OpOverload)
    return Call.of(node.target, args, kwargs)


def loss_of_graph(graph: Graph, values: Values) -> Tensor:
    """Return the value of a graph's loss; it has one."""
    assert graph.loss is not None, "graph_to_align gives graphs of a loss"
    found: Tensor = values[graph.loss]
    return found
