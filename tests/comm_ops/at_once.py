"""Collectives as tests ask for them: waited for at once, without an algorithm or by one, and in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hetu_fx.comm_ops.plans.algorithm import Algorithm
from hetu_fx.comm_ops.wire.algorithms import Collectives
from hetu_fx.comm_ops.wire.collectives import Exchange, FlatCollectives
from hetu_fx.comm_ops.wire.groups import GroupTable, active


def flat(ranks: Sequence[int], table: GroupTable) -> FlatCollectives:
    """Return collectives by messages, without levels."""
    return FlatCollectives(ranks, table, is_async=False)


def chosen(ranks: Sequence[int], algorithm: Algorithm, table: GroupTable) -> Collectives:
    """Return collectives as ops run them."""
    return Collectives(ranks, algorithm, table, is_async=False)


def gather_in_place(buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int]) -> Exchange[list[Tensor]]:
    """Start to fill every rank's part of a buffer with what that rank has there."""
    parts = buffer.split(list(sizes))
    flat = FlatCollectives(ranks, active(), 0)
    return flat.gather(parts[flat.table.position(ranks)], [(size,) for size in sizes], parts)
