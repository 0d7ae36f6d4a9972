"""Where a slice stands in a dense part, as runs of bytes: what one process reads out of another's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hetu_fx.annotations.annotation import Annotation, Shape
from hetu_fx.annotations.region import Intervals, length
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, SliceTransfer, TensorMove
from hetu_fx.comm_ops.plans.slices import Dims
from hetu_fx.comm_ops.wire.packing import local_dims
from hetu_fx.comm_ops.wire.peers.system import Extents

LEAST_RUN_BYTES = 512
"""Shorter runs, in the mean, are packed: the system takes about as long for one as for copying so much (measured)."""

RUNS_AT_ONCE = 1 << 14
"""So many runs are listed at a time: some 50 bytes each, which is little beside what they bring."""


@dataclass(frozen=True)
class SliceRead:
    """What a rank reads out of one sender's parts, several slices after each other, for its own parts.

    Attributes:
        sender: the rank whose parts they are; this rank itself for what it keeps.
        tensors: for each run of `taken`, then for each of `placed`, the number of its tensor.
        taken, placed: runs in the sender's parts and in this rank's; as many bytes, in the same order.
    """

    sender: int
    tensors: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    taken: Extents
    placed: Extents

    def at(self, senders: Extents, own: Extents) -> tuple[Extents, Extents]:
        """Return both sides' runs in memory, given the address of every tensor's part on both sides."""
        return _moved(self.taken, senders[self.tensors[0]]), _moved(self.placed, own[self.tensors[1]])


def contiguous_runs(shape: Sequence[int], where: Sequence[Intervals], itemsize: int) -> Extents:
    """List the runs of the slice `where` of a dense tensor in row-major order."""
    runs = np.array([[0, itemsize]], dtype=np.int64)
    stride = itemsize
    for size, intervals in zip(reversed(shape), reversed(where), strict=True):
        if len(runs) == 1 and runs[0, 1] == stride:  # all of what is inside
            runs = np.array([(a * stride, (b - a) * stride) for a, b in intervals if a < b], dtype=np.int64)
            runs = runs.reshape(-1, 2)
        else:
            firsts = np.concatenate([np.arange(a, b) for a, b in intervals] or [np.arange(0)]) * stride
            starts = firsts[:, None] + runs[:, 0]
            runs = np.stack([starts.ravel(), np.tile(runs[:, 1], len(firsts))], axis=1)
        stride *= size
    return runs


def num_runs(shape: Sequence[int], where: Sequence[Intervals]) -> int:
    """Count the runs of a slice that is not empty, without listing them."""
    count, is_whole = 1, True
    for size, intervals in zip(reversed(shape), reversed(where), strict=True):
        count *= len(intervals) if is_whole else length(intervals)
        is_whole = is_whole and intervals == ((0, size),)
    return count


def in_long_runs(move: TensorMove, transfer: SliceTransfer) -> bool:
    """Tell whether a slice lies in few runs in its sender's part, so that it is better read there than packed."""
    runs = _num_runs_at(*_sides(move, transfer)[0])
    return (runs - 1) * LEAST_RUN_BYTES <= transfer.numel * move.itemsize


def slice_reads(plan: BsrPlan, rank: int) -> Iterator[SliceRead]:
    """List what `rank` reads for a plan, by sender, in portions. What stays where it is is not read."""
    by_sender: dict[int, list[SliceTransfer]] = {}
    for transfer in plan.incoming.get(rank, ()):
        if not plan.moves[transfer.move].stays(rank):
            by_sender.setdefault(transfer.sender, []).append(transfer)
    for _, transfers in sorted(by_sender.items()):
        for portion in _portions(plan.moves, transfers):
            yield _read(plan.moves, portion)


def _portions(moves: Sequence[TensorMove], transfers: Sequence[SliceTransfer]) -> Iterator[list[SliceTransfer]]:
    """Cut a list of slices so that lists of their runs are short, if not those of one slice."""
    portion: list[SliceTransfer] = []
    runs = 0
    for transfer in transfers:
        portion.append(transfer)
        runs += sum(_num_runs_at(*side) for side in _sides(moves[transfer.move], transfer))
        if runs >= RUNS_AT_ONCE:
            yield portion
            portion, runs = [], 0
    if portion:
        yield portion


def _read(moves: Sequence[TensorMove], transfers: Sequence[SliceTransfer]) -> SliceRead:
    sides = [_sides(moves[transfer.move], transfer) for transfer in transfers]
    itemsizes = [moves[transfer.move].itemsize for transfer in transfers]
    taken, placed = (
        [_runs_at(*side, itemsize) for side, itemsize in zip(places, itemsizes, strict=True)]
        for places in zip(*sides, strict=True)
    )
    numbers = [transfer.move for transfer in transfers]
    of_taken, of_placed = (np.repeat(numbers, [len(runs) for runs in side]) for side in (taken, placed))
    return SliceRead(transfers[0].sender, (of_taken, of_placed), np.concatenate(taken), np.concatenate(placed))


_Side: TypeAlias = tuple[Annotation, int, Shape, Dims]


def _sides(move: TensorMove, transfer: SliceTransfer) -> tuple[_Side, _Side]:
    """Say where a slice stands before and after."""
    return (
        (move.source, transfer.sender, move.shape, transfer.dims),
        (move.target, transfer.receiver, move.shape, transfer.dims),
    )


@lru_cache(maxsize=128)  # the blocks of a model have slices alike
def _runs_at(at: Annotation, rank: int, shape: Shape, dims: Dims, itemsize: int) -> Extents:
    return contiguous_runs(at.region(rank, shape).local_shape, _where(at, rank, shape, dims), itemsize)


@lru_cache(maxsize=4096)
def _num_runs_at(at: Annotation, rank: int, shape: Shape, dims: Dims) -> int:
    return num_runs(at.region(rank, shape).local_shape, _where(at, rank, shape, dims))


def _where(at: Annotation, rank: int, shape: Shape, dims: Dims) -> list[Intervals]:
    where = local_dims(at, rank, shape, dims)
    return [intervals for intervals in where if intervals is not None]  # a state's sizes are all known


def _moved(runs: Extents, addresses: Extents) -> Extents:
    moved = runs.copy()
    moved[:, 0] += addresses
    return moved
