"""Remove from a flat functional graph what changes nothing, and say what attention masks mean, where that is simpler.

Each rule looks at one node (a no-op cast, view or copy) and returns the node that has the same value, or None.

Models under export write out masks that their eager code never makes: all true, or causal. Without the mask torch
has faster kernels, which skip what is masked and read grouped heads without repeating them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, operand
from hetu_fx.graph.graph import drop_dead_nodes
from hetu_fx.graph.positions import Affine, AtMostZero, Known, positional_values

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default

CASTS = frozenset({
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default,
    aten.type_as.default,
})  # fmt: skip
COPIES = frozenset({
    aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.alias.default, aten.clone.default,
})  # fmt: skip
VIEWS = frozenset({aten.view.default, aten.reshape.default, aten.expand.default, aten.view_as.default})
VIEWS_OF_PAIRS = frozenset({aten.view_as_complex.default, aten.view.dtype})
SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})
MADE_LIKE: dict[Any, Callable[..., Any]] = {
    aten.new_zeros.default: aten.zeros.default, aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default, aten.new_empty.default: aten.empty.memory_format,
}  # fmt: skip
SLICE_DEFAULTS = [None, 0, None, None, 1]
OVER_ALL: dict[Any, Callable[..., Any]] = {
    aten._is_all_true.default: aten.all.default, aten._is_any_true.default: aten.any.default,
}  # fmt: skip
OF_PARTS: dict[Any, Callable[..., Any]] = {
    aten.select_backward.default: aten.select_scatter.default, aten.slice_backward.default: aten.slice_scatter.default,
}  # fmt: skip
DROPOUTS = frozenset({aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default})


def clean(graph: fx.Graph) -> None:
    """Simplify a flat functional graph in place, keeping every output's value and gradient."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        node.kwargs = {key: item for key, item in node.kwargs.items() if key not in ("pin_memory", "layout")}
        replacement = RULES[node.target](node) if node.target in RULES else None
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
    drop_dead_nodes(graph)


def remove_detached(graph: fx.Graph, carriers: Collection[fx.Node]) -> None:
    """Take the detached form of a tensor that carries no gradient for that tensor: they differ in nothing.

    A write to one is a write to the other, so this comes before writes are followed. Torch makes both where a trace
    computes values.

    Args:
        graph: flat.
        carriers: the nodes that carry a gradient.
    """
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        if operand(node) not in carriers:
            node.replace_all_uses_with(operand(node))
            graph.erase_node(node)


def _instead(node: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Insert another call before a node, which has the same value."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs)
    meta.copy_meta(node, made, with_value=True)
    return made


def _simplify_cast(node: fx.Node) -> fx.Node | None:
    source = operand(node)
    if meta.dtype(source) == meta.dtype(node):
        return source
    if node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs:
        return None
    return _instead(node, aten.to.dtype, source, meta.dtype(node))


def _simplify_copy(node: fx.Node) -> fx.Node | None:
    return None if node.kwargs else operand(node)


def _simplify_view(node: fx.Node) -> fx.Node | None:
    """Drop a view that changes nothing. Any other becomes a reshape: on a part of its operand another kernel may have
    run, which lays its result out in another way, and nothing here depends on sharing memory."""
    if meta.same_shape(node, operand(node)):
        return operand(node)
    if node.target is aten.view.default:
        node.target = aten.reshape.default
    return None


def _lay_out_operand(node: fx.Node) -> None:
    """Give an op that takes one order in memory only its operand in it; a trace leaves out what its example has."""
    given = operand(node)
    if not _is_call(given, aten.contiguous.default):
        with node.graph.inserting_before(node):
            made = node.graph.call_function(aten.contiguous.default, (given,))
        meta.copy_meta(given, made, with_value=True)
        node.update_arg(0, made)


def _simplify_squeeze(node: fx.Node) -> fx.Node | None:
    """Name the dims that were dropped, so that rows cut to one keep their dim."""
    source = operand(node)
    dropped = [dim for dim, size in enumerate(meta.shape(source)) if isinstance(size, int) and size == 1]
    if meta.same_shape(node, source):
        return source
    if node.target is not aten.squeeze.default:
        return None
    return _instead(node, aten.squeeze.dims, source, dropped)


def _simplify_new(node: fx.Node) -> fx.Node:
    """Make a constant by itself: the tensor that lent its dtype is not read, and gives it no place in the model."""
    example = meta.value(node)
    return _instead(node, MADE_LIKE[node.target], *node.args[1:], dtype=example.dtype, device=example.device)


def _simplify_part(node: fx.Node) -> fx.Node:
    """Put the gradient of a part into zeros, which other ops do as well."""
    gradient, sizes, *place = node.args
    example = meta.value(node)
    zeros = _instead(node, aten.zeros.default, sizes, dtype=example.dtype, device=example.device)
    return _instead(node, OF_PARTS[node.target], zeros, gradient, *place)


def _simplify_slice(node: fx.Node) -> fx.Node | None:
    given = list(node.args) + SLICE_DEFAULTS[len(node.args) :]
    start, end, step = given[2:]
    whole = start in (0, None) and end in (None, sys.maxsize) and step == 1
    return operand(node) if whole else None


def _simplify_dropout(node: fx.Node) -> fx.Node | None:
    return None if node.args[2] and node.args[1] != 0 else operand(node)


def _simplify_detach(node: fx.Node) -> fx.Node | None:
    return None if carries_gradient(meta.dtype(node)) else operand(node)


def _simplify_add(node: fx.Node) -> fx.Node | None:
    adds_nothing = type(node.args[1]) is int and node.args[1] == 0
    return operand(node) if adds_nothing and meta.dtype(node) == meta.dtype(operand(node)) else None


def _simplify_cat(node: fx.Node) -> fx.Node | None:
    """Drop operands of shape (0,), which torch.cat ignores (an empty cache starts as one)."""
    pieces: Any = node.args[0]
    kept = [piece for piece in pieces if [meta.expression(size) for size in meta.shape(piece)] != [0]]
    if len(kept) == len(pieces) or not kept or any(meta.dtype(piece) != meta.dtype(node) for piece in kept):
        return None
    if len(kept) == 1:
        only: fx.Node = kept[0]
        return only
    node.args = (kept, *node.args[1:])
    return None


def _simplify_truth(node: fx.Node) -> fx.Node:
    return _instead(node, OVER_ALL[node.target], operand(node))


def _simplify_item(node: fx.Node) -> fx.Node | None:
    """Take an operand of those that are broadcast together: itself where it is as large as all, or made as large as one
    that is."""
    source, index = node.args
    if not isinstance(source, fx.Node) or source.target is not aten.broadcast_tensors.default:
        return None
    taken = source.args[0][index]  # type: ignore[index]
    assert isinstance(taken, fx.Node)
    if meta.same_shape(node, taken):
        return taken
    largest = (one for one in source.args[0] if isinstance(one, fx.Node) and meta.same_shape(node, one))  # type: ignore[union-attr]
    found = next(largest, None)
    return None if found is None else _instead(node, aten.expand_as.default, taken, found)


RULES: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    **dict.fromkeys(CASTS, _simplify_cast),
    **dict.fromkeys(COPIES, _simplify_copy),
    **dict.fromkeys(VIEWS, _simplify_view),
    **dict.fromkeys(DROPOUTS, _simplify_dropout),
    **dict.fromkeys(SQUEEZES, _simplify_squeeze),
    **dict.fromkeys(MADE_LIKE, _simplify_new),
    **dict.fromkeys(VIEWS_OF_PAIRS, _lay_out_operand),
    **dict.fromkeys(OVER_ALL, _simplify_truth),
    **dict.fromkeys(OF_PARTS, _simplify_part),
    aten.slice.Tensor: _simplify_slice,
    aten.detach.default: _simplify_detach,
    aten.add.Tensor: _simplify_add,
    aten.cat.default: _simplify_cat,
    operator.getitem: _simplify_item,
}


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
    grouped = grouped_heads(node)
    if grouped is not None and not argument(node, "enable_gqa"):
        node.args = (node.args[0], *grouped, *node.args[3:])
        node.update_kwarg("enable_gqa", True)


def grouped_heads(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return keys and values of an attention from before each of their heads was repeated; None if they were not."""
    key, value = (_before_repeat(given) for given in node.args[1:3])
    if key is None or value is None or meta.hints(key)[-3] != meta.hints(value)[-3]:
        return None
    return (key, value) if meta.hints(operand(node))[-3] == meta.hints(operand(node, 1))[-3] else None


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
