"""Collectives that are started now and waited for later, each by the algorithm that its op carries.

They travel in between where messages do. Padded ones, and those in two levels of a device's memory, are over when they
are started; ranks that read each other's memory do so in the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

from torch import Tensor

from hetu_fx.comm_ops.plans.algorithm import Algorithm
from hetu_fx.comm_ops.wire.collectives import PendingWork, begin_gather, begin_reduce, begin_sum
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded
from hetu_fx.comm_ops.wire.peers.exchanges import (
    Summand,
    begin_gather_read,
    begin_reduce_read,
    begin_sum_read,
    room_of_summand,
)
from hetu_fx.comm_ops.wire.two_level import (
    all_gather_two_level,
    all_reduce_two_level,
    gathered_bytes,
    in_thread,
    readers,
    reduce_scatter_two_level,
)

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class PendingCollective(Generic[Made]):
    """A collective of some ranks under way: what it was given must stay as it is until it is waited for, once."""

    what: str
    ranks: Sequence[int]
    table: GroupTable
    end: Callable[[], Made]

    def wait(self) -> Made:
        """Return what it makes, or raise CommError after the group's timeout."""
        with guarded(self.what, self.ranks, self.table):
            return self.end()


def place_of_sum(
    like: Tensor, shape: Sequence[int], ranks: Sequence[int], algorithm: Algorithm, table: GroupTable
) -> Summand | None:
    """Return where to make what `start_sum` is to sum, so that others read it there; None where it does not matter.

    Nobody but the sum has it. The first call for some ranks is collective over them, and all ask alike.
    """
    num_bytes = prod(shape) * like.itemsize
    if algorithm.in_two_levels(num_bytes):
        return None
    peers = readers(like, num_bytes, ranks, table)
    return None if peers is None else room_of_summand(shape, like.dtype, peers)


def start_sum(
    x: Tensor | Summand, ranks: Sequence[int], algorithm: Algorithm, table: GroupTable
) -> PendingCollective[Tensor]:
    """Start what `all_reduce_two_level` does; collective over `ranks`."""
    what = "all-reduce"
    if isinstance(x, Summand):
        peers = readers(x.value, x.value.nbytes, ranks, table)
        assert peers is not None, "it stands where others read it"
        with guarded(what, ranks, table):
            return PendingCollective(what, ranks, table, begin_sum_read(x, ranks, table, peers).end)
    with guarded(what, ranks, table):
        if algorithm.in_two_levels(x.nbytes):
            end = _in_levels(lambda at: all_reduce_two_level(x, ranks, algorithm, at), x, ranks, algorithm, table)
        elif peers := readers(x, x.nbytes, ranks, table):
            end = begin_sum_read(x, ranks, table, peers).end
        else:
            end = begin_sum(x, ranks, table).end
    return PendingCollective(what, ranks, table, end)


def start_reduce(
    parts: Sequence[Tensor], ranks: Sequence[int], algorithm: Algorithm, table: GroupTable
) -> PendingCollective[Tensor]:
    """Start what `reduce_scatter_two_level` does; collective over `ranks`."""
    what, num_bytes = "reduce-scatter", sum(part.nbytes for part in parts)
    with guarded(what, ranks, table):
        if algorithm.in_two_levels(num_bytes):
            end = _in_levels(
                lambda at: reduce_scatter_two_level(parts, ranks, algorithm, at), parts[0], ranks, algorithm, table
            )
        elif peers := readers(parts[0], num_bytes, ranks, table):
            end = begin_reduce_read(parts, ranks, table, peers).end
        elif algorithm.pads(num_bytes):
            end = PendingWork(reduce_scatter_two_level(parts, ranks, algorithm, table)).end
        else:
            end = begin_reduce(parts, ranks, table).end
    return PendingCollective(what, ranks, table, end)


def start_gather(
    x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], algorithm: Algorithm, table: GroupTable
) -> PendingCollective[list[Tensor]]:
    """Start what `all_gather_two_level` does; collective over `ranks`."""
    what, num_bytes = "all-gather", gathered_bytes(x, shapes)
    with guarded(what, ranks, table):
        if algorithm.in_two_levels(num_bytes):
            end = _in_levels(
                lambda at: all_gather_two_level(x, shapes, ranks, algorithm, at), x, ranks, algorithm, table
            )
        elif peers := readers(x, num_bytes, ranks, table):
            end = begin_gather_read(x, shapes, ranks, table, peers).end
        elif algorithm.pads(num_bytes):
            end = PendingWork(all_gather_two_level(x, shapes, ranks, algorithm, table)).end
        else:
            end = begin_gather(x, shapes, ranks, table).end
    return PendingCollective(what, ranks, table, end)


def _in_levels(
    act: Callable[[GroupTable], Made], x: Tensor, ranks: Sequence[int], algorithm: Algorithm, table: GroupTable
) -> Callable[[], Made]:
    """Do it beside what else the rank does; at once on a device, whose own queue goes on meanwhile."""
    if not x.is_cpu:
        return PendingWork(act(table)).end
    made: list[Made] = []
    exchange = in_thread(lambda beside: made.append(act(beside)), ranks, algorithm, table)

    def end() -> Made:
        exchange.end()
        return made[0]

    return end
