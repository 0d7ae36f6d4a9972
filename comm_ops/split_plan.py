"""Split collectives on paper (Hetu v2 section 5.2): which devices of unequal groups meet for which slices.

For every finest slice each group of the union lists its holders; as many device groups are made as the
longest list is long, the j-th taking holder j (round robin) of every list: one holder from every group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
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
    for held in _slices(change):
        for ranks in _round_robin(held.holders):
            members = parts.setdefault(ranks, [[] for _ in ranks])
            for member in members if held.home is None else [members[held.home]]:
                member.append(held.dims)
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
    return all(found.stays for found in _slices(change))


@dataclass(frozen=True, slots=True)
class _Held:
    """A finest slice: its holders per group, and under a split top the one group that owns it.

    `stays` says that the owning group holds it on the same ranks before and after.
    """

    dims: Dims
    holders: tuple[tuple[int, ...], ...]
    home: int | None
    stays: bool


@lru_cache(maxsize=64)
def _slices(change: Change) -> tuple[_Held, ...]:
    found = []
    owned = any(isinstance(annotation.top, Split) for annotation in (change.source, change.target))
    for part in finest_slices(change):
        owners = [rank for copy in part.owners for ranks in copy for rank in ranks]
        before, after = _by_group(change.source, owners), _by_group(change.target, part.receivers)
        whole, cut = (after, before) if isinstance(change.source.top, Split) else (before, after)
        home = next(iter(cut)) if owned else None
        stays = home is None or before[home] == after[home]
        found.append(_Held(part.dims, tuple(whole[index] for index in sorted(whole)), home, stays))
    return tuple(found)


def _by_group(annotation: Annotation, ranks: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Sort ranks into their groups, in the order of their positions."""
    found: dict[int, list[int]] = {}
    for index, position in sorted(map(annotation.place, ranks)):
        found.setdefault(index, []).append(annotation.groups[index].ranks[position])
    return {index: tuple(members) for index, members in found.items()}


def _round_robin(lists: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    count = max(map(len, lists))
    return list(zip(*(itertools.islice(itertools.cycle(ranks), count) for ranks in lists), strict=True))
