"""Write scaled_dot_product_attention out, so that its dropout can be made like any other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.calls import arguments
from hetu_fx.graph.edit import insert
from hetu_fx.graph.meta import HALVES

aten = torch.ops.aten

Drop = Callable[[fx.Node], fx.Node]


def explicit_attention(node: fx.Node, drop: Drop) -> fx.Node:
    """Insert softmax(q k^T * scale + mask), dropped by `drop`, times v before an attention node; return it.

    Rows whose every key is masked give zero, as torch's op does.
    """
    query, key, value, mask, _, is_causal, scale, enable_gqa = arguments(node).values()
    if enable_gqa:
        key, value = (_repeated_heads(node, operand, query) for operand in (key, value))
    factor = 1 / math.sqrt(meta.hints(query)[-1]) if scale is None else scale
    scaled = insert(node, aten.mul.Tensor, query, factor)
    scores = insert(node, aten.matmul.default, scaled, insert(node, aten.transpose.int, key, -2, -1))
    blocked = _causal(node, query, key) if is_causal else None
    if mask is not None:
        is_choice = meta.dtype(mask) is torch.bool
        blocked = insert(node, aten.logical_not.default if is_choice else aten.isneginf.default, mask)
        scores = scores if is_choice else insert(node, aten.add.Tensor, scores, mask)
    weights = _softmax(node, scores, blocked, meta.dtype(query))
    return insert(node, aten.matmul.default, drop(weights), value)


def _softmax(node: fx.Node, scores: fx.Node, blocked: fx.Node | None, dtype: torch.dtype) -> fx.Node:
    """Softmax that gives blocked positions zero; the least finite number keeps whole blocked rows from being nan."""
    if blocked is not None:
        least = torch.finfo(meta.dtype(scores)).min
        scores = insert(node, aten.masked_fill.Scalar, scores, blocked, least)
    if dtype in HALVES:
        upper = insert(node, aten.softmax.int, scores, -1, torch.float32)
        weights = insert(node, aten.to.dtype, upper, dtype)
    else:
        weights = insert(node, aten.softmax.int, scores, -1)
    return weights if blocked is None else insert(node, aten.masked_fill.Scalar, weights, blocked, 0.0)


def _causal(node: fx.Node, query: fx.Node, key: fx.Node) -> fx.Node:
    device = meta.value(query).device
    rank = len(meta.shape(query))
    rows, columns = (
        insert(node, aten.arange.default, _size(node, operand, rank - 2), device=device) for operand in (query, key)
    )
    return insert(node, aten.gt.Tensor, columns, insert(node, aten.unsqueeze.default, rows, 1))


def _repeated_heads(node: fx.Node, operand: fx.Node, query: fx.Node) -> fx.Node:
    """Repeat each head of `operand` as often as the query has heads for it."""
    rank = len(meta.shape(operand))
    heads, wanted = meta.hints(operand)[rank - 3], meta.hints(query)[rank - 3]
    sizes = [_size(node, operand, dim) for dim in range(rank)]
    single = insert(node, aten.unsqueeze.default, operand, rank - 2)
    many = insert(node, aten.expand.default, single, [*sizes[:-2], wanted // heads, *sizes[-2:]])
    return insert(node, aten.reshape.default, many, [*sizes[:-3], wanted, *sizes[-2:]])


def _size(node: fx.Node, operand: fx.Node, dim: int) -> Any:
    size = meta.shape(operand)[dim]
    return insert(node, aten.sym_size.int, operand, dim) if meta.is_symbolic(size) else size
