"""Split collectives on paper (Hetu v2 section 5.2): which devices of unequal groups meet for which slices.

For every finest slice each group of the union lists its holders; as many device groups are made as the
longest list is long, the j-th taking holder j (round robin) of every list: one holder from every group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hetu_fx.annotations.region import length
from hetu_fx.annotations.states import Split
from hetu_fx.comm_ops.plans.slices import Dims, Slice, finest_slices
from hetu_fx.comm_ops.plans.transition import Transition


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
def slice_groups(transition: Transition) -> tuple[SliceGroup, ...]:
    """List the collectives of a top-tier change by ranks: the one order in which all ranks run them."""
    parts: dict[tuple[int, ...], list[list[Dims]]] = {}
    for held in _slices(transition):
        for ranks in _round_robin(held.holders):
            members = parts.setdefault(ranks, [[] for _ in ranks])
            for member in members if held.home is None else [members[held.home]]:
                member.append(held.dims)
    return tuple(SliceGroup(ranks, tuple(map(tuple, parts[ranks]))) for ranks in sorted(parts))


@lru_cache(maxsize=65536)
def groups_of(transition: Transition, rank: int) -> tuple[SliceGroup, ...]:
    """List the collectives that `rank` takes part in, in order."""
    return tuple(group for group in slice_groups(transition) if rank in group.ranks)


@lru_cache(maxsize=4096)
def fits(transition: Transition) -> bool:
    """Tell whether split collectives can make the change: no partial inside groups, and slices that stay.

    A group that owns a slice alone (under a split top) must hold it on the same ranks before and after. It does,
    and slices need not be listed, unless it cuts the dim of the top itself.
    """
    shardings = (*transition.source.shardings, *transition.target.shardings)
    if any(s.num_summands > 1 for s in shardings):
        return False
    cut_by_top = {a.top.dim for a in (transition.source, transition.target) if isinstance(a.top, Split)}
    cut_inside = {split.dim for sharding in shardings for split in sharding.splits}
    return not cut_by_top & cut_inside or all(found.stays for found in _slices(transition))


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
def _slices(transition: Transition) -> tuple[_Held, ...]:
    group_of = {rank: index for index, group in enumerate(transition.source.groups) for rank in group.ranks}
    owned = any(isinstance(annotation.top, Split) for annotation in (transition.source, transition.target))
    held = _held_by_one if owned else _held_by_all
    return tuple(held(transition, part, group_of) for part in finest_slices(transition))


def _held_by_all(transition: Transition, part: Slice, group_of: Mapping[int, int]) -> _Held:
    return _Held(part.dims, tuple(_by_group(part.receivers, group_of).values()), None, stays=True)


def _held_by_one(transition: Transition, part: Slice, group_of: Mapping[int, int]) -> _Held:
    owners = (rank for copy in part.owners for ranks in copy for rank in ranks)
    before, after = _by_group(owners, group_of), _by_group(part.receivers, group_of)
    whole, cut = (after, before) if isinstance(transition.source.top, Split) else (before, after)
    (home,) = cut
    return _Held(part.dims, tuple(whole.values()), home, before[home] == after[home])


def _by_group(ranks: Iterable[int], group_of: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Sort ranks, which come in the order of their groups, into these."""
    return {index: tuple(members) for index, members in itertools.groupby(ranks, group_of.__getitem__)}


def _round_robin(lists: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    count = max(map(len, lists))
    return list(zip(*(itertools.islice(itertools.cycle(ranks), count) for ranks in lists), strict=True))
