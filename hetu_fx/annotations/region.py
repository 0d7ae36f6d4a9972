"""What a device holds of a tensor's index space: the definition every algorithm is checked against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from hetu_fx.annotations.states import Split

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of index space: one half-open interval per dim."""

    bounds: tuple[Interval, ...]

    @property
    def numel(self) -> int:
        """Number of entries."""
        return math.prod(stop - start for start, stop in self.bounds)


@dataclass(frozen=True, slots=True)
class Region:
    """Tells what a device's dense local tensor stands for.

    `dims` gives, per dim, the global intervals it holds in local order; the region is their product, and the
    local dim is the intervals laid end to end. `summand` is None for a copy, else the number of the summand
    among those that add up to the value.
    """

    dims: tuple[Intervals, ...]
    summand: int | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the dense local tensor."""
        return tuple(length(intervals) for intervals in self.dims)

    @property
    def role(self) -> str:
        """What the local tensor is: a "copy" of the value there, or a "summand" of it."""
        return "copy" if self.summand is None else "summand"

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The disjoint boxes in local row-major order; none for an empty region."""
        return tuple(Box(bounds) for bounds in itertools.product(*self.dims))

    @property
    def local_boxes(self) -> tuple[Box, ...]:
        """Where each of `boxes` stands in the dense local tensor."""
        return tuple(Box(bounds) for bounds in itertools.product(*map(offsets, self.dims)))


def length(intervals: Intervals) -> int:
    """Count the indices in disjoint intervals."""
    return sum(stop - start for start, stop in intervals)


def offsets(intervals: Intervals) -> Intervals:
    """Lay intervals end to end from 0."""
    ends = list(itertools.accumulate(stop - start for start, stop in intervals))
    return tuple(zip([0, *ends[:-1]], ends, strict=True)) if ends else ()


def whole(size: int) -> Intervals:
    """Return the intervals of an uncut dim."""
    return ((0, size),) if size else ()


def split_interval(intervals: Intervals, split: Split, position: int) -> Intervals:
    """Keep the part of `intervals`, laid end to end, that `position` of `split` holds."""
    size = length(intervals)
    start, stop = split.bounds(size, position)
    if split.outer == len(intervals) == 1:
        low = intervals[0][0]
        return ((low + start * split.inner, low + stop * split.inner),) if start < stop else ()
    middle = size // (split.outer * split.inner)
    kept: list[Interval] = []
    for block in range(split.outer):
        base = block * middle
        kept += select(intervals, (base + start) * split.inner, (base + stop) * split.inner)
    return merge(kept)


def select(intervals: Intervals, start: int, stop: int) -> list[Interval]:
    """Take the entries `start` to `stop`, counted along `intervals` laid end to end."""
    taken = []
    for (low, _), (first, last) in zip(intervals, offsets(intervals), strict=True):
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            taken.append((low + begin - first, low + end - first))
    return taken


def merge(intervals: Iterable[Interval]) -> Intervals:
    """Join intervals that touch."""
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
