"""Whether the sequences of a packed row can be kept apart, and whether what fills a row is seen by it.

Where tokens of a row meet, parameters still to come, something must say which may: an attention mask. In a packed row
it has to follow from position ids, which restart with each sequence, and is made for such a row to see. In a row that
is filled up at its end a causal mask will do. Any other op in which tokens meet (a convolution, a recurrence, a mean)
knows nothing of sequences.

What counts tokens along a row, or compares them, tells where in its row a token stands. Masks may be made of that, as
they are checked for sequences; an activation that learns it otherwise (a table of positions that is read by counting up
instead of by position ids) is another one for a sequence that does not stand first.

Whether an attention mask keeps the sequences of a packed row apart: found by making it for such a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from hetu_fx.base.device_types import HOST
from hetu_fx.base.dtypes import is_real
from hetu_fx.deduction.factors.factors import FactorMap, OpFactors
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, evaluate_op
from hetu_fx.graph.edit import ancestors, descendants
from hetu_fx.graph.graph import Graph, Leaf, LeafKind
from hetu_fx.graph.simplify import ATTENTION
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.sequence_parallel import Classes, activations, sequence_classes
from hetu_fx.transforms.rewrites.per_sequence import PER_SEQUENCE


def why_not_packed(graph: Graph, factors: FactorMap, flow: Flow, positions: str) -> str:
    """Return why position ids do not keep the sequences of a row apart; "" where they do.

    Args:
        graph: a captured program that has the input `positions`.
        factors, flow: what is known of it.
        positions: the input of position ids.
    """
    follows = descendants(graph, [leaf.node for leaf in graph.leaves_of(LeafKind.INPUT) if leaf.name == positions])

    known: dict[fx.Node, bool] = {}

    def is_masked(attention: fx.Node) -> bool:
        masks = [argument(attention, name) for name in _MASKS[attention.target]]
        return any(keeps_apart(mask) for mask in masks if isinstance(mask, fx.Node) and mask in follows)

    def keeps_apart(mask: fx.Node) -> bool:
        if mask not in known:
            known[mask] = _keeps_apart(graph, mask, positions)
        return known[mask]

    lacks = f"has no mask that follows from {positions!r} and keeps sequences apart"
    unmasked = _first_reason(graph, factors, flow, is_masked, lacks)
    return unmasked or _reader_of_places(graph, factors, flow)


def why_whole_rows(graph: Graph, factors: FactorMap, flow: Flow) -> str:
    """Return why attention in packed rows is paid for all pairs of their tokens; "" where it is paid by sequence."""
    lacks = "has a mask of which is not known that it keeps sequences apart"
    return _first_reason(graph, factors, flow, lambda node: node.target is PER_SEQUENCE, lacks)


def why_not_padded(graph: Graph, factors: FactorMap, flow: Flow) -> str:
    """Return why tokens may see what fills a row after them; "" where they do not."""
    return _first_reason(graph, factors, flow, lambda node: bool(argument(node, "is_causal")), "is not causal")


def _first_reason(
    graph: Graph, factors: FactorMap, flow: Flow, is_masked: Callable[[fx.Node], bool], lacks: str
) -> str:
    for node in _meetings(graph, factors, flow):
        where = f"{node.target} ({meta.source_line(node)})"
        if node.target not in _MASKS:
            return f"tokens of a row meet in {where}, which takes no mask"
        if not is_masked(node):
            return f"{where} {lacks}"
    return ""


def _reader_of_places(graph: Graph, factors: FactorMap, flow: Flow) -> str:
    """Return which activation learns the places of tokens in their row by other ways than a mask; "" if none does."""
    tokens = sequence_classes(graph, factors, flow, frozenset())
    feeding, active = _before_parameters(graph, flow), activations(graph, factors, flow)
    places: set[fx.Node] = set()
    for node in graph.graph.nodes:
        told = [operand for operand in _read(node, factors) if operand in places]
        if node not in active:
            if told or (factors.is_op(node) and _meets(factors.op(node), tokens)):
                places.add(node)
        elif told and node in feeding:
            where, source = meta.source_line(node), told[0]
            return (
                f"{node.target} ({where}) reads places of tokens in their row, from {source.target}, not position ids"
            )
    return ""


def _read(node: fx.Node, factors: FactorMap) -> list[fx.Node]:
    """Return the tensors whose values an op reads, but for an attention's mask; those of an item, the tuple's."""
    if not factors.is_op(node):
        return list(node.all_input_nodes) if node.op == "call_function" and meta.has_tensor(node) else []
    op = factors.op(node)
    masks = [argument(node, name) for name in _MASKS.get(node.target, ())]
    return [o.node for i, o in enumerate(op.operands) if i not in op.unread and o.node not in masks]


def _meets(op: OpFactors, tokens: Classes) -> bool:
    return not op.known or bool(tokens & (op.whole | op.reduced | op.sharded | op.placed))


def _meetings(graph: Graph, factors: FactorMap, flow: Flow) -> Iterator[fx.Node]:
    """Yield the ops on activations in which tokens meet before the last parameter is read."""
    tokens = sequence_classes(graph, factors, flow, frozenset())
    feeding = _before_parameters(graph, flow)
    for node in graph.graph.nodes:
        if not factors.is_op(node) or node not in feeding or not flow.is_mixed(node):
            continue
        if _meets(factors.op(node), tokens):
            yield node


def _before_parameters(graph: Graph, flow: Flow) -> frozenset[fx.Node]:
    """Return the nodes from whose values something is computed with a parameter."""
    found: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        if node in found or any(operand in flow.parameters - flow.inputs for operand in node.all_input_nodes):
            found.update(node.all_input_nodes)
    return frozenset(found)


_MASKS: Mapping[Any, tuple[str, ...]] = {
    ATTENTION: ("attn_mask",),
    PER_SEQUENCE: ("attn_mask", "query_places", "key_places"),
}
"""What says which tokens see each other, by op."""

_HIDDEN = -1e4  # what is added to the score of a token that is not seen, or less


def _keeps_apart(graph: Graph, mask: fx.Node, positions: str) -> bool:
    """Tell whether no token sees one of another sequence under the mask; False where that cannot be told.

    Two sequences are laid into each row of the example's length, all else being ones. `positions` is the input of
    position ids.
    """
    needed = ancestors([mask])
    inputs = {leaf.node: leaf for leaf in graph.leaves_of(LeafKind.INPUT)}
    others = {node for node in needed if node.op in ("placeholder", "get_attr")} - inputs.keys()
    (length,) = {meta.hints(leaf.node)[-1] for leaf in inputs.values() if leaf.name == positions}
    if others or length < 2:
        return False
    first = length // 2
    values = {node: _value(leaf, positions, first) for node, leaf in inputs.items() if node in needed}
    sees = _seen(_run(graph, needed, values)[mask])
    across = sees[..., :first, first:], sees[..., first:, :first]
    return sees.shape[-2:] == (length, length) and not any(part.any() for part in across)


def _seen(mask: Tensor) -> Tensor:
    """Return which tokens see each other by a mask: one of truths, of numbers that are added, or places of tokens."""
    if not is_real(mask.dtype) and mask.dtype != torch.bool:
        return mask[:, :, None, 0] == mask[:, None, :, 0]
    return mask if mask.dtype == torch.bool else mask > _HIDDEN


def _value(leaf: Leaf, positions: str, first: int) -> Tensor:
    """Return an input of the example's shape: ones, or the position ids of two sequences."""
    like = meta.value(leaf.node)
    ones = torch.ones(meta.hints(leaf.node), dtype=like.dtype)
    if leaf.name != positions:
        return ones
    counted = torch.arange(ones.shape[-1])
    return torch.where(counted < first, counted, counted - first).to(like.dtype).expand_as(ones).contiguous()


def _run(graph: Graph, needed: frozenset[fx.Node], values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Run the ops that are needed, on the CPU; return all values."""
    for node in graph.graph.nodes:
        if node in needed and node.op == "call_function":
            values[node] = evaluate_op(node, values, device=HOST)
    return values
