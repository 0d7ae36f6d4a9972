"""Values that are linear in one other: what such a one sends can be sent of the other instead."""

from __future__ import annotations

from torch import fx

from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.graph import meta
from hetu_fx.transforms.layouts.flow import Flow


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
