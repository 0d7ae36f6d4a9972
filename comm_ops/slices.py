"""Finest slices of a change: the parts of a tensor that all ranks hold or miss as a whole.

Per dim, the cut points of all ranks' regions (before and after) bound cells; cells that the same ranks hold
form one class, so a split of a sub-factor makes no more slices than a plain one. A slice is a product of
classes, in general several boxes. With equal cuts this gives Hetu's LCM of degrees, with ratios their union.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.region import Intervals, length, merge, offsets
from hetu_fx.comm_ops.change import Change

Dims = tuple[Intervals, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of index space (global intervals per dim), who owns it before and who needs it after.

    `owners[copy][summand]` are the ranks that hold a summand in a copy of the value (one copy set and one
    summand where nothing is duplicated over groups or partial). Receivers of a target summand other than the
    first, whose value is zero, are left out. A symbolic dim counts as one entry.
    """

    dims: Dims
    owners: tuple[tuple[tuple[int, ...], ...], ...]
    receivers: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of entries, per entry of the symbolic dims."""
        return math.prod(map(length, self.dims))


@lru_cache(maxsize=4096)
def finest_slices(change: Change) -> tuple[Slice, ...]:
    """List the finest slices of a change, in row-major order of their first entry's class."""
    annotations = (change.source, change.target)
    regions = [a.region(rank, change.shape).dims for a in annotations for rank in a.ranks]
    classes = [_classes([dims[dim] for dims in regions]) for dim in range(len(change.shape))]
    owners = _holders(change.source, change, classes)
    receivers = _holders(change.target, change, classes)
    slices = []
    for index in itertools.product(*map(range, map(len, classes))):
        dims = tuple(classes[dim][number] for dim, number in enumerate(index))
        slices.append(Slice(dims, _owners(change, owners.get(index, ())), _receivers(change, receivers.get(index, ()))))
    return tuple(slices)


@lru_cache(maxsize=65536)
def locate(region: Dims, dims: Dims) -> Dims:
    """Give the local intervals of the slice `dims` inside the dense tensor of `region`, which holds it."""
    return tuple(_locate_dim(held, wanted) for held, wanted in zip(region, dims, strict=True))


def _locate_dim(held: Intervals, wanted: Intervals) -> Intervals:
    located = []
    for (low, high), (first, _) in zip(held, offsets(held), strict=True):
        shift = first - low
        located += [(a + shift, b + shift) for a, b in wanted if low <= a and b <= high]
    return merge(located)


def _classes(held: Iterable[Intervals]) -> tuple[Intervals, ...]:
    """Group the cells between all cut points by the distinct interval lists that contain them."""
    distinct = sorted(set(held))
    points = sorted({point for intervals in distinct for bounds in intervals for point in bounds})
    cells: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    covers = [_cover(intervals, points) for intervals in distinct]
    for number, cell in enumerate(itertools.pairwise(points)):
        holders = tuple(index for index, cover in enumerate(covers) if number in cover)
        if holders:
            cells.setdefault(holders, []).append(cell)
    return tuple(merge(bounds) for bounds in cells.values())


def _cover(intervals: Intervals, points: Sequence[int]) -> set[int]:
    number = {point: index for index, point in enumerate(points)}
    return {cell for start, stop in intervals for cell in range(number[start], number[stop])}


def _holders(
    annotation: Annotation, change: Change, classes: Sequence[Sequence[Intervals]]
) -> dict[tuple[int, ...], list[int]]:
    holders: dict[tuple[int, ...], list[int]] = {}
    firsts = [{intervals[0][0]: number for number, intervals in enumerate(dim)} for dim in classes]
    for rank in annotation.ranks:
        dims = annotation.region(rank, change.shape).dims
        inside = [_inside(held, first) for held, first in zip(dims, firsts, strict=True)]
        for index in itertools.product(*inside):
            holders.setdefault(index, []).append(rank)
    return holders


@lru_cache(maxsize=4096)
def _inside_cached(held: Intervals, firsts: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(number for point, number in firsts if any(start <= point < stop for start, stop in held))


def _inside(held: Intervals, firsts: dict[int, int]) -> tuple[int, ...]:
    return _inside_cached(held, tuple(firsts.items()))


def _owners(change: Change, ranks: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    source = change.source
    if not source.has_partial:
        return ((tuple(ranks),),)
    copies = []
    for members in source.copy_sets:
        summands: dict[int, list[int]] = {}
        for rank in ranks:
            if rank in members:
                summands.setdefault(source.region(rank, change.shape).summand or 0, []).append(rank)
        copies.append(tuple(tuple(summands[number]) for number in sorted(summands)))
    return tuple(copies)


def _receivers(change: Change, ranks: Sequence[int]) -> tuple[int, ...]:
    if not change.target.has_partial:
        return tuple(ranks)
    return tuple(rank for rank in ranks if not change.target.region(rank, change.shape).summand)
