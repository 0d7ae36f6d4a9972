"""Tensors whose elements follow from their position alone.

Export writes masks out as arithmetic on index ranges. Reading that arithmetic back as what it means needs no value of
any batch, and holds for every size.
"""

from __future__ import annotations

from functools import partial

from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.affine import Affine, Positional, mapped
from hetu_fx.graph.position_call import Call, Known
from hetu_fx.graph.position_readers import READERS


def positional_values(graph: fx.Graph) -> Known:
    """Return what is known of every tensor whose elements follow from their positions alone."""
    known: dict[fx.Node, Positional] = {}
    for node in graph.nodes:
        reader = READERS.get(node.target) if node.op == "call_function" and meta.is_tensor(node) else None
        if reader is None:
            continue
        found = mapped(reader(Call(node, known)), partial(_flat_where_single, shape=meta.shape(node)))
        if found is not None:
            known[node] = found
    return known


def _flat_where_single(value: Affine, shape: tuple[meta.Size, ...]) -> Affine:
    """Drop the slopes of dims of size 1, where the only index is 0, and give every dim of `shape` one."""
    slopes = (0,) * (len(shape) - len(value.slopes)) + value.slopes
    kept = (0 if isinstance(size, int) and size == 1 else slope for slope, size in zip(slopes, shape, strict=True))
    return Affine(value.constant, tuple(kept))
