"""Split collectives on paper (Hetu v2 section 5.2): which devices of unequal groups meet for which slices.

For every finest slice each group of the union lists its holders; as many device groups are made as the
longest list is long, the j-th taking holder j (round robin) of every list: one holder from every group.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.region import length
from hetu_fx.annotations.states import Split
from hetu_fx.comm_ops.change import Change
from hetu_fx.comm_ops.slices import Dims, finest_slices


@dataclass(frozen=True, slots=True)
class SliceGroup:
    """One collective: `ranks` has one member per group of the union, in order.

    `parts[i]` lists the slices of member i: those it contributes (gather) or gets (scatter). In an all-reduce
    all members have all of them.
    """

    ranks: tuple[int, ...]
    parts: tuple[tuple[Dims, ...], ...]

    @property
    def numel(self) -> int:
        """Entries of all slices, each counted once."""
        return sum(math.prod(map(length, dims)) for dims in {d for part in self.parts for d in part})


@lru_cache(maxsize=4096)
def slice_groups(change: Change) -> tuple[SliceGroup, ...]:
    """List the collectives of a top-tier change by ranks: the one order in which all ranks run them."""
    parts: dict[tuple[int, ...], list[list[Dims]]] = {}
    for dims, lists, home in _slices(change):
        for ranks in _round_robin(lists):
            members = parts.setdefault(ranks, [[] for _ in ranks])
            for index, member in enumerate(members):
                if home is None or index == home:
                    member.append(dims)
    return tuple(SliceGroup(ranks, tuple(map(tuple, parts[ranks]))) for ranks in sorted(parts))


@lru_cache(maxsize=65536)
def groups_of(change: Change, rank: int) -> tuple[SliceGroup, ...]:
    """List the collectives that `rank` takes part in, in order."""
    return tuple(group for group in slice_groups(change) if rank in group.ranks)


@lru_cache(maxsize=4096)
def fits(change: Change) -> bool:
    """Tell whether split collectives can make the change: no partial inside groups, and slices that stay.

    A group that owns a slice alone (under a split top) must hold it on the same ranks before and after.
    """
    if any(s.num_summands > 1 for s in (*change.source.shardings, *change.target.shardings)):
        return False
    return all(_stays(change, dims, home) for dims, _, home in _slices(change))


def _slices(change: Change) -> list[tuple[Dims, list[tuple[int, ...]], int | None]]:
    """List per finest slice its holders in every group, and the one group that owns it under a split top."""
    whole, cut = change.source, change.target
    if isinstance(whole.top, Split):
        whole, cut = cut, whole
    found = []
    for part in finest_slices(Change(change.source, change.target, change.shape)):
        lists = [_holders(whole, index, change, part.dims) for index in range(len(whole.groups))]
        found.append((part.dims, lists, _home(cut, change, part.dims)))
    return found


def _home(annotation: Annotation, change: Change, dims: Dims) -> int | None:
    if not isinstance(annotation.top, Split):
        return None
    indices = range(len(annotation.groups))
    return next(index for index in indices if _holders(annotation, index, change, dims))


def _stays(change: Change, dims: Dims, home: int | None) -> bool:
    if home is None:
        return True
    return _holders(change.source, home, change, dims) == _holders(change.target, home, change, dims)


def _holders(annotation: Annotation, group: int, change: Change, dims: Dims) -> tuple[int, ...]:
    """List the ranks of one group that hold a slice; slices are held whole or not at all."""
    corner = [intervals[0][0] for intervals in dims]
    return tuple(
        rank
        for rank in annotation.groups[group].ranks
        if all(
            any(start <= point < stop for start, stop in held)
            for point, held in zip(corner, annotation.region(rank, change.shape).dims, strict=True)
        )
    )


def _round_robin(lists: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    count = max(map(len, lists))
    return list(zip(*(itertools.islice(itertools.cycle(ranks), count) for ranks in lists), strict=True))
