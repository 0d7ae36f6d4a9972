"""Flat messages among ranks: uneven all-gather and reduce-scatter, all-reduce; started now, ended by wait().

A buffer is one contiguous tensor, the segments of `ranks` end to end, `sizes[i]` entries for `ranks[i]`.

Measured on gloo (2 cores, 25 MB of fp32 in all, milliseconds on 2 ranks / 4 ranks, even sizes):
  all-gather:     one broadcast per segment 10 / 23; isend and irecv 12 / 22; all_gather_into_tensor (even
                  sizes only) 14 / 26; all_to_all_single 20 / 34; padded 23 / 31 (sizes 2:1:1:1: 51 / 86).
  reduce-scatter: isend and irecv, then a sum 15 / 25; all_to_all_single, then a sum 18 / 30; all_reduce and a
                  slice 23 / 42; list-form reduce_scatter 26 / 53.
So: broadcasts, and isend/irecv with the sum in rank order, which also makes the sum the same on every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from hetu_fx.comm_ops.groups import GroupTable, active, guarded


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


def segments(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Cut a flat buffer in views of `sizes` entries."""
    ends = list(accumulate(sizes))
    return [buffer[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def gather_segments(buffer: torch.Tensor, sizes: Sequence[int], ranks: Sequence[int]) -> Exchange:
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


def sum_segments(
    buffer: torch.Tensor, sizes: Sequence[int], ranks: Sequence[int], givers: Sequence[int]
) -> Exchange:
    """Sum this rank's segment over what `givers`, a part of `ranks`, have there, in the order of `givers`.

    The sum stands in this rank's segment after wait(); the other segments are this rank's summands and stay.
    """
    if len(ranks) == 1:
        return Exchange()
    table = active()
    return _sum_by_messages(table, segments(buffer, sizes), ranks, givers)


def _sum_by_messages(
    table: GroupTable, parts: Sequence[torch.Tensor], ranks: Sequence[int], givers: Sequence[int]
) -> Exchange:
    group, here = table.group(tuple(ranks)), list(ranks).index(table.rank)
    mine = parts[here]
    received = {giver: torch.empty_like(mine) for giver in givers if giver != table.rank and mine.numel()}
    works: list[Any] = [
        dist.irecv(part, src=table.to_global(giver), group=group) for giver, part in received.items()
    ]
    # Each rank starts with the one after it, so that no rank is sent to by all at once.
    for step in range(1, len(ranks)):
        to = (here + step) % len(ranks)
        if table.rank in givers and parts[to].numel():
            works.append(dist.isend(parts[to], dst=table.to_global(ranks[to]), group=group))

    def finish() -> None:
        if received:
            summands = [mine.clone() if giver == table.rank else received[giver] for giver in givers]
            torch.add(*summands[:2], out=mine) if len(summands) > 1 else mine.copy_(summands[0])
            for summand in summands[2:]:
                mine.add_(summand)

    return Exchange(tuple(ranks), works, finish)


def sum_all(buffer: torch.Tensor, ranks: Sequence[int]) -> Exchange:
    """Sum a buffer over `ranks`, in place."""
    if len(ranks) == 1:
        return Exchange()
    work = dist.all_reduce(buffer, group=active().group(tuple(ranks)), async_op=True)
    return Exchange(tuple(ranks), [work])


def reduce_world(value: torch.Tensor, world: int, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Reduce a small tensor over all ranks of the world, in place, and give it back."""
    if world > 1:
        with guarded("all-reduce", range(world)):
            dist.all_reduce(value, op=op, group=active().group(range(world)))
    return value
