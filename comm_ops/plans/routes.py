"""How a slice gets from those who hold it to those who want it by collectives: the one place that decides it.

The bridge asks it for ranks that each get what they lack, split collectives for groups that all of them meet by one
rank each; what is priced are the routes that run. Where there is no route, messages of a batched send-receive are.

Of split collectives (Hetu v2 section 5.2) every finest slice has a list of its holders from each group of the union; as
many device groups are made as the longest list is long, the j-th taking holder j (round robin) of every list.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from hetu_fx.annotations.region import length
from hetu_fx.annotations.states import Duplicate, Partial, Split, State
from hetu_fx.comm_ops.plans.slices import Dims, Slice, finest_slices
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.errors import ResolveError


class RouteKind(StrEnum):
    """The collective that a route takes; its value is the name of the op."""

    SUM = "all_reduce"
    SCATTER = "reduce_scatter"
    GATHER = "all_gather"


@dataclass(frozen=True, slots=True)
class Route:
    """One collective for every column of `holders`, each of which lists ranks that hold the same.

    Attributes:
        kind: the collective.
        holders: ranks by what they hold; the j-th column takes holder j of every list, in turn where one is shorter.
        home: the list whose ranks have the value, or get the sum; None where all get it.
        givers: the ranks whose summands count, if not all do.
    """

    kind: RouteKind
    holders: tuple[tuple[int, ...], ...]
    home: int | None = None
    givers: tuple[int, ...] = ()

    def columns(self) -> list[tuple[int, ...]]:
        """List the ranks of every collective, in the order of `holders`."""
        count = max(map(len, self.holders))
        return list(zip(*(itertools.islice(itertools.cycle(ranks), count) for ranks in self.holders), strict=True))


def route_kind(before: State | None, after: State | None) -> RouteKind | None:
    """Return the collective that takes a tensor from one state over some groups to another; None: none does."""
    match before, after:
        case Partial(), Duplicate():
            return RouteKind.SUM
        case Partial(), Split():
            return RouteKind.SCATTER
        case Split(), Duplicate():
            return RouteKind.GATHER
    return None


def _route_across(part: Slice, kind: RouteKind, group_of: Mapping[int, int]) -> Route | None:
    """Return the route of a slice that groups meet for, one rank of each in every collective.

    None where the group that alone has the slice before or after holds it on other ranks then.
    """
    after = _by_group(part.receivers, group_of)
    if kind is RouteKind.SUM:
        return Route(kind, tuple(after.values()))
    before = _by_group((rank for copy in part.owners for ranks in copy for rank in ranks), group_of)
    everyone, own = (after, before) if kind is RouteKind.GATHER else (before, after)
    (home,) = own
    return Route(kind, tuple(everyone.values()), home) if before[home] == after[home] else None


def find_routes(part: Slice) -> tuple[Route, ...] | None:
    """Return the routes by which every receiver gets what it lacks, each rank in one collective at most.

    None where only messages do that.
    """
    match part.owners:
        case ((owners,),):
            return _gather(owners, part.receivers)
    left, routes = set(part.receivers), list[Route]()
    for summands in part.owners:
        members = {rank for ranks in summands for rank in ranks}
        found = _sum(summands, sorted(left & members))
        if found is None:
            return None
        routes += found
        left -= members
    return None if left else tuple(routes)


def _gather(owners: Sequence[int], receivers: Sequence[int]) -> tuple[Route, ...] | None:
    """Give all who lack a value that of one owner who reads it too."""
    missing = sorted(set(receivers) - set(owners))
    if not missing:
        return ()
    reading = [owner for owner in owners if owner in receivers]
    return (Route(RouteKind.GATHER, ((reading[0],), *((rank,) for rank in missing)), 0),) if reading else None


def _sum(summands: Sequence[tuple[int, ...]], receivers: Sequence[int]) -> tuple[Route, ...] | None:
    """Sum one copy's summands for those of its ranks that want them."""
    if len(summands) == 1 or not receivers:
        return ()
    if len(receivers) == 1:
        return (_scatter(summands, receivers[0]),)
    members = sorted(rank for ranks in summands for rank in ranks)
    if list(receivers) != members:
        return None
    if len({len(ranks) for ranks in summands}) == 1:
        return (Route(RouteKind.SUM, tuple(summands)),)
    givers = tuple(sorted(ranks[0] for ranks in summands))
    return (Route(RouteKind.SUM, tuple((rank,) for rank in members), givers=givers),)


def _scatter(summands: Sequence[tuple[int, ...]], receiver: int) -> Route:
    """Sum for one rank: of every summand that of the holder at its place."""
    home = next(number for number, ranks in enumerate(summands) if receiver in ranks)
    place = summands[home].index(receiver)
    return Route(RouteKind.SCATTER, tuple((ranks[place % len(ranks)],) for ranks in summands), home)


def _by_group(ranks: Iterable[int], group_of: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Sort ranks, which come in the order of their groups, into these."""
    return {index: tuple(members) for index, members in itertools.groupby(ranks, group_of.__getitem__)}


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
def collectives_of_rank(transition: Transition, rank: int) -> tuple[SliceGroup, ...]:
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
    kind = RouteKind.SUM if is_alone else route_kind(source.top, target.top)
    if kind is None:
        raise ResolveError(f"no split collective makes {transition}; the top must be summed, or gathered")
    group_of = {rank: index for index, group in enumerate(source.groups) for rank in group.ranks}
    return tuple((part.dims, _route_across(part, kind, group_of)) for part in finest_slices(transition))
