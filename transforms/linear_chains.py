"""Where a sum is cheapest: linear ops may run on summands, so that a sum is made of the smallest tensor on their way.

What experts make of the rows sent to them is put together token by token before it is summed; the cotangent of rows
that are sent to several experts is put together before it is summed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from hetu_fx.deduction.factors import FactorMap
from hetu_fx.graph import meta
from hetu_fx.transforms.flow import Flow


def shrinks_later(node: fx.Node, factors: FactorMap) -> bool:
    """Tell whether linear ops, each the only reader of the one before, make a smaller tensor of the value."""
    size = meta.numel(node) if meta.is_tensor(node) else 0
    return any(meta.numel(reader) < size for reader in linear_readers(node, factors))


def linear_readers(node: fx.Node, factors: FactorMap) -> Iterator[fx.Node]:
    """Yield ops that are linear in the one before, and its only reader, from the reader of `node` on."""
    while (reader := _only_reader(node)) is not None and _is_linear_in(reader, node, factors):
        yield reader
        node = reader


def repeats_entries(node: fx.Node, factors: FactorMap, flow: Flow) -> bool:
    """Tell whether the value is larger than the only tensor that gradients go back to, and linear in it."""
    source = linear_source(node, factors, flow)
    return source is not None and meta.numel(node) > meta.numel(source)


def linear_source(node: fx.Node, factors: FactorMap, flow: Flow) -> fx.Node | None:
    """Return the only tensor that gradients go back to from a value, if that is linear in it."""
    trained = [source for source in node.all_input_nodes if source in flow.differentiable]
    if len(trained) != 1 or not meta.is_tensor(trained[0]) or not _is_linear_in(node, trained[0], factors):
        return None
    return trained[0]


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_linear_in(node: fx.Node, source: fx.Node, factors: FactorMap) -> bool:
    if not factors.is_op(node) or not meta.is_tensor(node):
        return False
    op = factors.op(node)
    places = frozenset(i for i, operand in enumerate(op.operands) if operand.node is source)
    return len(places) == 1 and places in op.linear
