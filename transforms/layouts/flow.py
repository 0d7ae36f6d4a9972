"""What every value of a graph depends on: inputs, parameters, the op it is an item of, one that it is linear in.

Gradients flow through what parameters that are trained reach. What is linear in one other value need not be sent: that
other can be sent instead.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument
from hetu_fx.graph.edit import ancestors, descendants
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind
from hetu_fx.graph.leaves.leaf_ops import LEAF, leaf_operands
from hetu_fx.graph.leaves.uses import Use

aten = torch.ops.aten
_NO_GRADIENT = {
    aten.detach.default,
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.rand_like.default, aten.randn_like.default),
    *(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}
_STATISTICS: Mapping[Any, tuple[int, ...]] = {
    aten.native_layer_norm.default: (1, 2),
    aten.native_group_norm.default: (1, 2),
}
"""Results without gradient: means and deviations, which only a backward reads."""


@dataclass(frozen=True)
class Flow:
    """Sets of nodes by what reaches them.

    Attributes:
        inputs: nodes that a batch input, or its size, reaches.
        parameters: nodes that a parameter reaches.
        differentiable: values through which a gradient reaches a trained parameter.
    """

    inputs: frozenset[fx.Node]
    parameters: frozenset[fx.Node]
    differentiable: frozenset[fx.Node]

    def through_inputs(self, node: fx.Node) -> bool:
        """Tell whether the value changes with the batch."""
        return node in self.inputs

    def is_mixed(self, node: fx.Node) -> bool:
        """Tell whether both batch and parameters reach the node: it belongs to exactly one stage."""
        return node in self.inputs and node in self.parameters


def build_flow(graph: Graph, frozen: frozenset[str] = frozenset()) -> Flow:
    """Return the flow of `graph`; parameters named in `frozen` get no gradient."""
    kinds = {leaf.node: leaf for leaf in graph.leaves}
    batch_kinds = {LeafKind.INPUT, LeafKind.RANDOM_STATE}
    inputs = {node for node, leaf in kinds.items() if leaf.kind in batch_kinds}
    parameters = {node for node, leaf in kinds.items() if leaf.kind is LeafKind.PARAMETER}
    trained = {node for node in parameters if kinds[node].name not in frozen}
    return Flow(
        descendants(graph, inputs),
        descendants(graph, parameters),
        descendants(graph, trained, lambda node: node.all_input_nodes if _carries_gradient(node) else ()),
    )


def parameters_with_gradient(graph: Graph, uses: Collection[Use], *, of_outputs: bool) -> frozenset[str]:
    """Return the names of parameters that a backward reaches; others have no gradient, which is not one of zeros.

    Args:
        graph: what it goes back through.
        uses: which operands calls of leaves have made gradients of.
        of_outputs: whether it begins at all outputs, and not at the loss alone.
    """

    def sources(node: fx.Node) -> Sequence[fx.Node]:
        if not _carries_gradient(node):
            return ()
        if node.target is not LEAF:
            return node.all_input_nodes
        name = argument(node, "name")
        return [operand for place, operand in enumerate(leaf_operands(node)) if (name, place) in uses]

    kinds = (OutputKind.LOSS, OutputKind.VALUE) if of_outputs else (OutputKind.LOSS,)
    reached = ancestors((node for kind in kinds for _, node in graph.outputs_of(kind)), sources)
    return frozenset(leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER) if leaf.node in reached)


def gradient_uses(graph: Graph) -> list[Use]:
    """Return all operands that calls of leaves may make gradients of, in the order of the graph, which ranks share."""
    return [
        (argument(node, "name"), place)
        for node in graph.graph.find_nodes(op="call_function", target=LEAF)
        for place, operand in enumerate(leaf_operands(node))
        if carries_gradient(meta.dtype(operand))
    ]


def _carries_gradient(node: fx.Node) -> bool:
    """Tell whether the value has gradients if an operand has: by its op and its kind; a tuple may hold one that has."""
    if node.target in _NO_GRADIENT or not meta.has_tensor(node):
        return False
    if is_item(node) and node.args[1] in _STATISTICS.get(tuple_producer(node).target, ()):
        return False
    return not meta.is_tensor(node) or carries_gradient(meta.dtype(node))


def is_item(node: fx.Node) -> bool:
    """Tell whether the node takes one tensor out of an op with several results."""
    return node.op == "call_function" and node.target is operator.getitem and meta.is_tensor(node)


def tuple_producer(item: fx.Node) -> fx.Node:
    """Return the op that an item is one result of."""
    whole = item.args[0]
    assert isinstance(whole, fx.Node)
    return whole


def linear_source(node: fx.Node, factors: FactorMap, flow: Flow) -> fx.Node | None:
    """Return the only tensor that gradients go back to from a value, if that is linear in it."""
    trained = [source for source in node.all_input_nodes if source in flow.differentiable]
    if len(trained) != 1 or not meta.is_tensor(trained[0]) or not _is_linear_in(node, trained[0], factors):
        return None
    return trained[0]


def _is_linear_in(node: fx.Node, source: fx.Node, factors: FactorMap) -> bool:
    if not factors.is_op(node) or not meta.is_tensor(node):
        return False
    op = factors.op(node)
    places = frozenset(i for i, operand in enumerate(op.operands) if operand.node is source)
    return len(places) == 1 and places in op.linear
