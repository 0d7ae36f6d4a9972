"""Flat messages among ranks: uneven all-gather and reduce-scatter, all-reduce; started now, ended by wait().

A buffer is one contiguous tensor, the segments of `ranks` end to end, `sizes[i]` entries for `ranks[i]`.

Measured on gloo (2 cores, 25 MB of fp32 in all, milliseconds on 2 ranks / 4 ranks, even sizes):
  all-gather:     one broadcast per segment 10 / 23; isend and irecv 12 / 22; all_gather_into_tensor (even
                  sizes only) 14 / 26; all_to_all_single 20 / 34; padded 23 / 31 (sizes 2:1:1:1: 51 / 86).
  reduce-scatter: isend and irecv, then a sum 15 / 25; all_to_all_single, then a sum 18 / 30; all_reduce and a
                  slice 23 / 42; list-form reduce_scatter 26 / 53.
So: broadcasts, and isend/irecv with the sum in rank order, which also makes the sum the same on every layout.

Exchanges of ranks on several nodes in two levels, as `comm_ops.two_level` has them, beside what else a rank does.

A level can only start when the one before has arrived, and a rank in its backward cannot wait for that: its peers may
need what it has yet to work out. So a thread takes the levels, exchange by exchange in the order in which all ranks
start them. Its messages are in groups of its own (`GroupTable.beside`), where no other message comes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.comm_ops.plans.algorithm import Algorithm
from hetu_fx.comm_ops.wire.groups import GroupTable, active, guarded
from hetu_fx.comm_ops.wire.serial_threads import InTurn
from hetu_fx.comm_ops.wire.two_level import gather_in_levels, groups_in_levels, reduce_in_levels, sum_in_levels

# Keeps these messages apart from others between the same two ranks.
_TAG = 0x425200


@dataclass(slots=True)
class Exchange:
    """A message under way; `wait` ends it, once, and then works out the result in place."""

    ranks: tuple[int, ...] = ()
    works: list[Any] = field(default_factory=list)
    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        """Block until the message is through, or raise CommError after the group's timeout."""
        with guarded("exchange", self.ranks):
            for work in self.works:
                work.wait()
        self.works.clear()
        if self.finish is not None:
            self.finish()
            self.finish = None


def segments(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut a flat buffer in views of `sizes` entries."""
    ends = list(accumulate(sizes))
    return [buffer[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def gather_segments(buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int]) -> Exchange:
    """Fill every rank's segment of `buffer` with what that rank has there. Collective over `ranks`."""
    if len(ranks) == 1:
        return Exchange()
    table = active()
    group = table.group(tuple(ranks))
    works = [
        dist.broadcast(segment, src=table.to_global(rank), group=group, async_op=True)
        for rank, segment in zip(ranks, segments(buffer, sizes), strict=True)
        if segment.numel()
    ]
    return Exchange(tuple(ranks), works)


def sum_segments(buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int], tag: int = 0) -> Exchange:
    """Sum every rank's segment over what all `ranks` have there, in their order. Collective over `ranks`.

    The sum stands in this rank's own segment after wait(); the other segments are its summands and stay.
    Exchanges of different tags may be under way together.
    """
    if len(ranks) == 1:
        return Exchange()
    table = active()
    group, parts, here = table.group(ranks), segments(buffer, sizes), table.position(ranks)
    mine = parts[here]
    others = [rank for rank in ranks if rank != table.rank]
    received = {rank: torch.empty_like(mine) for rank in others if mine.numel()}
    receives = [(dist.irecv, part, rank) for rank, part in received.items()]
    # Each rank starts with the one after it, so that no rank is sent to by all at once.
    turned = [(here + step) % len(ranks) for step in range(1, len(ranks))]
    sends = [(dist.isend, parts[to], ranks[to]) for to in turned if parts[to].numel()]
    works = _post([*receives, *sends], group, table, tag)

    def finish() -> None:
        if received:
            _sum_in_order(mine, [mine if rank == table.rank else received[rank] for rank in ranks])

    return Exchange(tuple(ranks), works, finish)


def _post(messages: Sequence[Any], group: dist.ProcessGroup, table: GroupTable, tag: int) -> list[Any]:
    peers = [(op, part, table.to_global(rank)) for op, part, rank in messages]
    if any(part.device.type != "cpu" for _, part, _ in peers):
        # NCCL needs one group call, or sends and receives of a pair wait for each other.
        return list(dist.batch_isend_irecv([dist.P2POp(op, part, peer, group) for op, part, peer in peers]))
    return [op(part, peer, group=group, tag=_TAG + tag) for op, part, peer in peers]


def _sum_in_order(result: Tensor, summands: Sequence[Tensor]) -> None:
    """Sum into `result`, which is one of `summands`; the first summand is written to."""
    total, *rest = summands
    for summand in rest:
        total.add_(summand)
    if total is not result:
        result.copy_(total)


def sum_all(buffer: Tensor, ranks: Sequence[int]) -> Exchange:
    """Sum a buffer over `ranks`, in place."""
    if len(ranks) == 1:
        return Exchange()
    work = dist.all_reduce(buffer, group=active().group(tuple(ranks)), async_op=True)
    return Exchange(tuple(ranks), [work])


def reduce_world(value: Tensor, world: int, op: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduce a small tensor over all ranks of the world, in place, and give it back."""
    if world > 1:
        with guarded("all-reduce", range(world)):
            dist.all_reduce(value, op=op, group=active().group(range(world)))
    return value


# Each takes the buffer, the sizes of its segments, the ranks, their nodes and a table, and works in place.
Levels = Callable[[Tensor, Sequence[int], Sequence[int], Sequence[int], GroupTable], None]

_turns: WeakKeyDictionary[GroupTable, InTurn] = WeakKeyDictionary()


def start_in_levels(
    levels: Levels, buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int], algorithm: Algorithm
) -> Exchange:
    """Start an exchange of host memory in two levels. Collective over `ranks`."""
    table = active()
    beside = table.beside("levels")
    for group in groups_in_levels(ranks, algorithm.nodes, table.rank):
        beside.group(group)  # created here, as threads must not create groups side by side

    def work() -> None:
        with torch.no_grad():
            levels(buffer, sizes, ranks, algorithm.nodes, beside)

    turn = _turns.setdefault(table, InTurn()).start(work)
    return Exchange(tuple(ranks), [turn])


def sum_all_in_levels(
    buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int], nodes: Sequence[int], table: GroupTable
) -> None:
    """Do what `exchange.sum_all` does; sums are made per node first."""
    buffer.copy_(sum_in_levels(buffer, ranks, nodes, table))


def sum_segments_in_levels(
    buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int], nodes: Sequence[int], table: GroupTable
) -> None:
    """Do what `exchange.sum_segments` does; sums are made per node first."""
    parts = segments(buffer, sizes)
    parts[table.position(ranks)].copy_(reduce_in_levels(parts, ranks, nodes, table))


def gather_segments_in_levels(
    buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int], nodes: Sequence[int], table: GroupTable
) -> None:
    """Do what `exchange.gather_segments` does."""
    parts = segments(buffer, sizes)
    found = gather_in_levels(parts[table.position(ranks)], [[size] for size in sizes], ranks, nodes, table)
    for part, rank, value in zip(parts, ranks, found, strict=True):
        if rank != table.rank:
            part.copy_(value)
