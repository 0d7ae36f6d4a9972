"""Finest slices of a change: the parts of a tensor that all ranks hold or miss as a whole.

Per dim, the cut points of all ranks' regions (before and after) bound cells; cells that the same ranks hold
form one class, so a split of a sub-factor makes no more slices than a plain one. A slice is a product of
classes, in general several boxes. With equal cuts this gives Hetu's LCM of degrees, with ratios their union.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from hetu_fx.annotations.annotation import Annotation, Shape
from hetu_fx.annotations.region import Intervals, length, merge, offsets, split_interval, whole
from hetu_fx.annotations.states import Partial, Sharding, Split
from hetu_fx.comm_ops.plans.transition import Transition

Dims = tuple[Intervals, ...]
Owners = tuple[tuple[tuple[int, ...], ...], ...]
Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of index space (global intervals per dim), who owns it before and who needs it after.

    `owners[copy][summand]` are the ranks that hold a summand in a copy of the value (one copy set and one
    summand where nothing is duplicated over groups or partial). Receivers of a target summand other than the
    first, whose value is zero, are left out. A symbolic dim counts as one entry.
    """

    dims: Dims
    owners: Owners
    receivers: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of entries, per entry of the symbolic dims."""
        return math.prod(map(length, self.dims))


@lru_cache(maxsize=4096)
def finest_slices(transition: Transition) -> tuple[Slice, ...]:
    """List the finest slices of a change, in row-major order of their first entry's class.

    Linear in the ranks and in the slices: slices that the same regions hold share one list of ranks.
    """
    for annotation in (transition.source, transition.target):
        annotation.check_shape(transition.shape)
    before = _held(transition.source, transition.shape)
    after = before if _cut_alike(transition.source, transition.target) else _held(transition.target, transition.shape)
    classes = [_classes({dims[dim] for dims in (*before, *after)}) for dim in range(len(transition.shape))]
    owners = _holders(before, classes)
    receivers = owners if after is before else _holders(after, classes)
    owners_of, receivers_of = _owner_table(transition, before), _receiver_table(transition, after)
    return tuple(
        Slice(
            tuple(classes[dim].members[number] for dim, number in enumerate(index)),
            owners_of(tuple(owners.get(index, ()))),
            receivers_of(tuple(receivers.get(index, ()))),
        )
        for index in itertools.product(*(range(len(found.members)) for found in classes))
    )


def least_entries(transition: Transition) -> int:
    """Count the entries that any plan of a change must send, each as often as it travels."""
    return sum(_least_copies(part) * part.numel for part in finest_slices(transition))


def _least_copies(part: Slice) -> int:
    """Count how often the slice must travel, at least.

    Where somebody owns the value, every receiver that does not takes one. Else the summands have to meet (one
    message less than there are summands), and all receivers but one that they may meet at take one.
    """
    values = {rank for copy in part.owners if len(copy) == 1 for rank in copy[0]}
    receivers = set(part.receivers)
    if values or not receivers:
        return len(receivers - values)
    owners = {rank for copy in part.owners for ranks in copy for rank in ranks}
    return min(map(len, part.owners)) - 1 + len(receivers) - bool(receivers & owners)


@lru_cache(maxsize=65536)
def locate(region: Dims, dims: Dims) -> Dims:
    """Return the local intervals of the slice `dims` inside the dense tensor of `region`, which holds it."""
    return tuple(_locate_dim(held, wanted) for held, wanted in zip(region, dims, strict=True))


def _locate_dim(held: Intervals, wanted: Intervals) -> Intervals:
    located = []
    for (low, high), (first, _) in zip(held, offsets(held), strict=True):
        shift = first - low
        located += [(a + shift, b + shift) for a, b in wanted if low <= a and b <= high]
    return merge(located)


@dataclass(frozen=True, slots=True)
class _Classes:
    """The classes of one dim's cells, and which of them make up each interval list that a rank holds."""

    members: tuple[Intervals, ...]
    inside: Mapping[Intervals, tuple[int, ...]]


def _cut_alike(one: Annotation, other: Annotation) -> bool:
    """Tell whether every rank holds the same region under both, by what annotations say of splits."""
    tops = {top if isinstance(top, Split) else None for top in (one.top, other.top)}
    return len(tops) == 1 and (one.groups, one.shardings) == (other.groups, other.shardings)


def _held(annotation: Annotation, shape: Shape) -> dict[Dims, list[int]]:
    """List the ranks that hold each distinct region."""
    held: dict[Dims, list[int]] = {}
    for index, (group, sharding) in enumerate(zip(annotation.groups, annotation.shardings, strict=True)):
        regions = _regions(sharding, _piece(annotation, index, shape))
        for rank, dims in zip(group.ranks, regions, strict=True):
            held.setdefault(dims, []).append(rank)
    return held


def _regions(sharding: Sharding, piece: Dims) -> list[Dims]:
    """List the region of every position of a group that shares `piece`."""
    regions = [piece]
    for axis in sharding.axes:
        if isinstance(axis, Split):
            dim, parts = axis.dim, [split_interval(piece[axis.dim], axis, at) for at in range(axis.ways)]
            regions = [(*region[:dim], part, *region[dim + 1 :]) for region in regions for part in parts]
        else:
            regions = [region for region in regions for _ in range(axis.ways)]
    return regions


def _piece(annotation: Annotation, index: int, shape: Shape) -> Dims:
    """Return the index space of one group; a symbolic dim counts as one entry."""
    piece = [whole(1 if size is None else size) for size in shape]
    if isinstance(annotation.top, Split):
        piece[annotation.top.dim] = split_interval(piece[annotation.top.dim], annotation.top, index)
    return tuple(piece)


def _classes(distinct: Collection[Intervals]) -> _Classes:
    """Group the cells between all cut points by the interval lists that contain them."""
    ordered = sorted(distinct)
    points = sorted({point for intervals in ordered for bounds in intervals for point in bounds})
    cover = _cover(ordered, points)
    numbers: dict[tuple[int, ...], int] = {}
    cells: list[list[tuple[int, int]]] = []
    inside: dict[Intervals, dict[int, None]] = {intervals: {} for intervals in ordered}
    for cell, holders in zip(itertools.pairwise(points), cover, strict=False):
        if not holders:
            continue
        number = numbers.setdefault(tuple(holders), len(numbers))
        if number == len(cells):
            cells.append([])
            for holder in holders:
                inside[ordered[holder]][number] = None
        cells[number].append(cell)
    return _Classes(tuple(map(merge, cells)), {intervals: tuple(found) for intervals, found in inside.items()})


def _cover(ordered: Sequence[Intervals], points: Sequence[int]) -> list[list[int]]:
    """List, for every cell, the numbers of the interval lists that contain it."""
    number = {point: index for index, point in enumerate(points)}
    cover: list[list[int]] = [[] for _ in points]
    for index, intervals in enumerate(ordered):
        for start, stop in intervals:
            for cell in range(number[start], number[stop]):
                cover[cell].append(index)
    return cover


def _holders(held: Iterable[Dims], classes: Sequence[_Classes]) -> dict[tuple[int, ...], list[int]]:
    """List the numbers of the regions that hold each product of classes."""
    holders: dict[tuple[int, ...], list[int]] = {}
    for number, dims in enumerate(held):
        for index in itertools.product(*(found.inside[part] for part, found in zip(dims, classes, strict=True))):
            holders.setdefault(index, []).append(number)
    return holders


def _rank_table(annotation: Annotation, held: Mapping[Dims, Sequence[int]]) -> Callable[[Numbers], tuple[int, ...]]:
    """Return the function from numbers of regions to the ranks that hold them, in the annotation's order."""
    by_number = list(held.values())
    order = {rank: position for position, rank in enumerate(annotation.ranks)}

    def ranks_of(numbers: Numbers) -> tuple[int, ...]:
        if len(numbers) == 1:
            return tuple(by_number[numbers[0]])
        return tuple(sorted(itertools.chain.from_iterable(by_number[n] for n in numbers), key=order.__getitem__))

    return ranks_of


def _owner_table(transition: Transition, held: Mapping[Dims, Sequence[int]]) -> Callable[[Numbers], Owners]:
    """Return the function from numbers of regions to their ranks, by copy and summand."""
    source, ranks_of = transition.source, _rank_table(transition.source, held)
    if not source.has_partial:
        return cache(lambda numbers: ((ranks_of(numbers),),))
    copies = source.copy_sets
    copy_of = {rank: number for number, members in enumerate(copies) for rank in members}
    summand_of = _summands(source)

    @cache
    def owners_of(numbers: Numbers) -> Owners:
        found: list[dict[int, list[int]]] = [{} for _ in copies]
        for rank in ranks_of(numbers):
            found[copy_of[rank]].setdefault(summand_of[rank], []).append(rank)
        return tuple(tuple(tuple(copy[number]) for number in sorted(copy)) for copy in found)

    return owners_of


def _receiver_table(transition: Transition, held: Mapping[Dims, Sequence[int]]) -> Callable[[Numbers], tuple[int, ...]]:
    target, ranks_of = transition.target, _rank_table(transition.target, held)
    if not target.has_partial:
        return cache(ranks_of)
    summand_of = _summands(target)
    return cache(lambda numbers: tuple(rank for rank in ranks_of(numbers) if not summand_of[rank]))


def _summands(annotation: Annotation) -> dict[int, int]:
    """Number the summand of every rank, as `Region.summand` does; 0 for a copy."""
    found: dict[int, int] = {}
    first = 0
    for group, sharding in zip(annotation.groups, annotation.shardings, strict=True):
        count = sharding.num_summands
        for position, rank in enumerate(group.ranks):
            found[rank] = first + (sharding.summand(position) if count > 1 else 0)
        first += count if isinstance(annotation.top, Partial) else 0
    return found
