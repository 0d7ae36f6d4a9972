"""A product of groups of rows with a matrix each, where each device has the matrices of some groups (experts)."""

from __future__ import annotations

import torch
from torch import fx

from hetu_fx.graph.calls import callee
from hetu_fx.transforms.specialize.shard import Shard

aten = torch.ops.aten


def grouped_product(shard: Shard) -> fx.Node:
    """Multiply the rows of the groups that the part has; zero for all other rows.

    Rows are turned so that the part's first comes first, and turned back; whatever the op does with rows that belong
    to no group comes to nothing, forward and backward.
    """
    rows, matrices, ends, *others = shard.given.values()
    start, own_ends = _groups(shard, ends)
    number = _numbers(shard, rows)
    elsewhere = shard.emit(aten.unsqueeze.default, _outside(shard, number, start, own_ends), 1)
    if start is not None:
        count = shard.emit(aten.select.int, ends, 0, -1)
        turned, back = (
            shard.emit(aten.remainder.Tensor, shard.emit(op, number, start), count)
            for op in (aten.add.Tensor, aten.sub.Tensor)
        )
        own_ends = shard.emit(aten.sub.Tensor, own_ends, start)
    kept = shard.emit(aten.masked_fill.Scalar, rows, elsewhere, 0.0)
    given = kept if start is None else shard.emit(aten.index_select.default, kept, 0, turned)
    product = shard.emit(callee(shard.node), given, matrices, own_ends, *others)
    product = product if start is None else shard.emit(aten.index_select.default, product, 0, back)
    return shard.emit(aten.masked_fill.Scalar, product, elsewhere, 0.0)


def _groups(shard: Shard, ends: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """Return the first row of the part's groups (None for row 0), and where each of them ends."""
    last = shard.first + shard.sizes[shard.position]
    start = shard.emit(aten.select.int, ends, 0, shard.first - 1) if shard.first else None
    return start, shard.emit(aten.slice.Tensor, ends, 0, shard.first, last)


def _numbers(shard: Shard, rows: fx.Node) -> fx.Node:
    """Number the rows from 0, on whatever device they are."""
    ones = shard.emit(aten.ones_like.default, shard.emit(aten.select.int, rows, 1, 0), dtype=torch.int64)
    return shard.emit(aten.sub.Tensor, shard.emit(aten.cumsum.default, ones, 0), 1)


def _outside(shard: Shard, number: fx.Node, start: fx.Node | None, ends: fx.Node) -> fx.Node:
    after = shard.emit(aten.ge.Tensor, number, shard.emit(aten.select.int, ends, 0, -1))
    if start is None:
        return after
    return shard.emit(aten.logical_or.default, after, shard.emit(aten.lt.Tensor, number, start))
