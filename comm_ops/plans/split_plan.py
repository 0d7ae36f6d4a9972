"""Split collectives on paper (Hetu v2 section 5.2): which devices of unequal groups meet for which slices.

For every finest slice each group of the union lists its holders; as many device groups are made as the
longest list is long, the j-th taking holder j (round robin) of every list: one holder from every group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hetu_fx.annotations.region import length
from hetu_fx.annotations.states import Split
from hetu_fx.comm_ops.plans.routes import Route, RouteKind, kind_between, route_across
from hetu_fx.comm_ops.plans.slices import Dims, finest_slices
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.errors import ResolveError


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
    """List the collectives of a top-tier transition by ranks: the one order in which all ranks run them."""
    parts: dict[tuple[int, ...], list[list[Dims]]] = {}
    for dims, route in _routes(transition):
        if route is None:
            raise ResolveError(f"no split collective makes {transition}: a slice changes hands inside its group")
        for ranks in route.columns():
            members = parts.setdefault(ranks, [[] for _ in ranks])
            for member in members if route.home is None else [members[route.home]]:
                member.append(dims)
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
    return not cut_by_top & cut_inside or all(route is not None for _, route in _routes(transition))


@lru_cache(maxsize=64)
def _routes(transition: Transition) -> tuple[tuple[Dims, Route | None], ...]:
    """List every finest slice with its route across the groups."""
    source, target = transition.source, transition.target
    is_alone = source.top is None and target.top is None  # a group meets no other, each rank sums what it has
    kind = RouteKind.SUM if is_alone else kind_between(source.top, target.top)
    if kind is None:
        raise ResolveError(f"no split collective makes {transition}; the top must be summed, or gathered")
    group_of = {rank: index for index, group in enumerate(source.groups) for rank in group.ranks}
    return tuple((part.dims, route_across(part, kind, group_of)) for part in finest_slices(transition))
