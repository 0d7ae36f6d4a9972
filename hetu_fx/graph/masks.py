"""Say what an attention mask means, where that is simpler than the mask.

Models under export write out masks that their eager code never makes: all true, or causal. Without the mask torch
has faster kernels, which skip what is masked and read grouped heads without repeating them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument
from hetu_fx.graph.graph import drop_dead_nodes
from hetu_fx.graph.position_readers import positional_values
from hetu_fx.graph.positions import Affine, AtMostZero, Known

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default


def name_masks(graph: fx.Graph) -> None:
    """Replace masks that are all true, or causal, by what says so, and read grouped heads in place."""
    attentions = graph.find_nodes(op="call_function", target=ATTENTION)
    known = positional_values(graph) if attentions else {}
    for node in attentions:
        _name_mask(node, known)
        if argument(node, "attn_mask") is None:
            _read_grouped_heads(node)
    drop_dead_nodes(graph)


def _name_mask(node: fx.Node, known: Known) -> None:
    mask, causal = argument(node, "attn_mask"), argument(node, "is_causal")
    meaning = known.get(mask) if isinstance(mask, fx.Node) else None
    if not isinstance(meaning, AtMostZero) or causal or not _same_without(node):
        return
    if meaning.always:
        _set(node, 3, "attn_mask", None)
    elif meaning.bound == _key_minus_query(len(meaning.bound.slopes)):
        _set(node, 3, "attn_mask", None)
        _set(node, 5, "is_causal", True)


def _same_without(node: fx.Node) -> bool:
    """Tell whether the result has its shape from queries, keys and values alone, with no dim that the mask gave it."""
    query, key, value = (meta.shape(operand)[:-2] for operand in node.args[:3])  # type: ignore[arg-type]
    leading = [meta.expression(size) for size in meta.shape(node)[:-2]]
    return any([meta.expression(size) for size in shape] == leading for shape in (query, key, value))


def _key_minus_query(ndim: int) -> Affine:
    """Return what is at most zero where a key is not after its query: torch's is_causal, counted from the start."""
    return Affine(0, (*(0,) * (ndim - 2), -1, 1))


def _read_grouped_heads(node: fx.Node) -> None:
    """Take keys and values from before each of their heads was repeated for the query's heads of its group."""
    query, key, value = node.args[:3]
    sources = [_before_repeat(operand) for operand in (key, value)]
    if argument(node, "enable_gqa") or None in sources or not isinstance(query, fx.Node):
        return
    grouped = {meta.hints(source)[-3] for source in sources if source is not None}
    if len(grouped) == 1 and meta.hints(query)[-3] == meta.hints(key)[-3]:  # type: ignore[arg-type]
        node.args = (query, *sources, *node.args[3:])
        node.update_kwarg("enable_gqa", True)


def _before_repeat(node: Any) -> fx.Node | None:
    """Return x where `node` is x with each of its heads (dim -3 of 4) repeated, or None."""
    if not _is_call(node, aten.reshape.default) or not _is_call(node.args[0], aten.expand.default):
        return None
    expanded = node.args[0]
    single = expanded.args[0]
    if not _is_call(single, aten.unsqueeze.default) or single.args[1] not in (2, -3):
        return None
    source: fx.Node = single.args[0]
    sizes = [meta.expression(size) for size in meta.shape(expanded)]
    if len(sizes) != 5 or [*sizes[:2], *sizes[3:]] != [meta.expression(size) for size in meta.shape(source)]:
        return None
    merged = [sizes[0], sizes[1] * sizes[2], *sizes[3:]]
    return source if merged == [meta.expression(size) for size in meta.shape(node)] else None


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def _set(node: fx.Node, position: int, name: str, item: object) -> None:
    """Set an argument where it stands, by position or by name."""
    if position < len(node.args):
        node.update_arg(position, item)  # type: ignore[arg-type]
    else:
        node.update_kwarg(name, item)  # type: ignore[arg-type]
