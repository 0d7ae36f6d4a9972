"""Plan around stragglers as Malleus does: groups, pipelines, layers and micro-batches, on two levels.

Minimise T = max_i m_i max_j y_ij l_ij, the steady seconds of the slowest pipeline, over how devices form
groups, groups pipelines, layers stages, and micro-batches pipelines (Malleus, SIGMOD 2025, DOI
10.1145/3725322, and its released planner; each module says where it leaves that). The upper level is here and
in `groups`; the lower level, exact, in `layers` and `allocate`; which devices take which place in `mapping`.

Groupings of all nodes are tried in order of their capacity sum 1 / y. A grouping of capacity C takes at least

    M L / C                                                                                      (1)

so the search ends when that is no less than the best T. The largest degree stays as it is given, as in the released
planner, and so does the number of pipelines unless others to choose from are given too. The result is a function of
the arguments alone.

Which groups form which pipeline (Malleus' pipeline orchestration) is found for groups of given kinds. For pipelines
with bottlenecks o_i the step's steady seconds are T = min over sum_i m_i = M, m_i >= stages, of

    max_i m_i o_i                                                                                (2)

A descent by moves and swaps between pairs of pipelines comes first; a listing then lowers T until no
placement is faster. Where that is too much to list or to go through, it is done for a few pipelines at a time,
the others left as they are, and nothing is proved. Left behind: the released planner allows stage counts near
the mean only, and gives every placement to a solver.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.allocate import spread_evenly
from hetu_fx.planner.search.malleus.device_groups import Grouping, GroupKind, groupings
from hetu_fx.planner.search.malleus.layers import (
    MOST_STEPS,
    Budget,
    FilledPipeline,
    Kinds,
    LayerFiller,
    Listing,
    micro_batches_within,
    most_below,
)
from hetu_fx.planner.search.malleus.mapping import (
    GroupMapping,
    Holdings,
    MalleusPipeline,
    MalleusResult,
    MalleusStage,
    WantedGroup,
    holdings,
    map_groups,
    order_ranks,
    wanted_groups,
)
from hetu_fx.planner.search.malleus.situation import MalleusSituation
from hetu_fx.plans.plan import Plan

MOST_SWAPS = 30_000
"""Exchanges that the descent tries, over a whole search."""

MOST_PARTS = 400
"""Parts of placements that are searched exactly, over a whole search."""

PART = 4
"""So many pipelines are a part."""

_PART_STEPS = 50_000


def search(
    situation: MalleusSituation, before: Plan | None = None, below: float = math.inf, pipelines: Sequence[int] = ()
) -> MalleusResult:
    """Return the best assignment found for the situation.

    Args:
        situation: devices, rates, model and batch.
        before: the plan that runs now: of equally fast assignments, one that moves less is taken.
        below: seconds; assignments that take as long or longer are not looked for.
        pipelines: numbers of pipelines to choose from besides the situation's own, which is kept where no other
            is faster; its memory is taken to hold for all of them.

    Raises `PlanError` when nothing fits, with a hint, or nothing takes less than `below`.
    """
    best: MalleusResult | None = None
    for count in dict.fromkeys((situation.num_pipelines, *pipelines)):
        if count <= situation.num_micro_batches:
            limit = below if best is None else best.objective
            best = _search(replace(situation, num_pipelines=count), before, limit) or best
    if best is None:
        raise PlanError(_nothing_fits(situation) if below == math.inf else f"no assignment takes less than {below} s")
    return best


def _search(situation: MalleusSituation, before: Plan | None, below: float) -> MalleusResult | None:
    """Return the best assignment to the situation's own number of pipelines; None when none is fast enough."""
    held = holdings(before, situation.num_layers)
    nodes = [order_ranks(ranks, situation.rates, held) for ranks in situation.nodes]
    placer = Placer(situation)
    best: tuple[Placement, Grouping] | None = None
    least = math.inf
    for grouping in groupings(situation, nodes):
        bound = situation.num_micro_batches * situation.num_layers / grouping.capacity if grouping.groups else math.inf
        least = min(least, bound)
        limit = best[0].seconds if best else below
        if bound < limit and (placement := placer.place(grouping.kinds, limit)) is not None:
            best = placement, grouping
    return None if best is None else _result(situation, *best, held, least, placer)


def _result(
    situation: MalleusSituation,
    placement: Placement,
    grouping: Grouping,
    held: Holdings,
    least: float,
    placer: Placer,
) -> MalleusResult:
    places = [place for index, filled in enumerate(placement.pipelines) for place in wanted_groups(index, filled)]
    mapped = map_groups(places, grouping.groups, held)
    pipelines = [
        MalleusPipeline(_stages(index, places, mapped), count) for index, count in enumerate(placement.micro_batches)
    ]
    used = {rank for group in mapped.groups for rank in group.devices}
    return MalleusResult(
        pipelines=tuple(sorted(pipelines, key=lambda pipeline: min(pipeline.stages[0].devices))),
        standby=tuple(rank for rank in situation.cluster.ranks if rank not in used),
        least_seconds=least,
        is_exact=placer.is_exact,
        crossings=mapped.crossings,
        moved_layers=mapped.moved_layers,
        num_pipelines_tried=placer.filler.num_filled,
    )


def _stages(pipeline: int, places: Sequence[WantedGroup], mapped: GroupMapping) -> tuple[MalleusStage, ...]:
    return tuple(
        MalleusStage(group.devices, place.stop - place.start, group.kind.seconds)
        for place, group in zip(places, mapped.groups, strict=True)
        if place.pipeline == pipeline
    )


def _nothing_fits(situation: MalleusSituation) -> str:
    need = situation.num_layers * situation.memory.at(0) if situation.memory is not None else 0.0
    return (
        f"no assignment of {situation.num_layers} layers and {situation.num_micro_batches} micro-batches to "
        f"{situation.num_pipelines} pipelines on devices {list(situation.cluster.ranks)} with groups of up to "
        f"{situation.degrees[0]}. Every pipeline needs a group, {need / 1e6:.4g} MB for its layers, and a "
        f"micro-batch per stage\nhint: use fewer pipelines, smaller groups, more micro-batches, or more devices"
    )


_ROUNDED = 1 - 1e-9  # a sum that is greater by less than rounding


@dataclass(frozen=True, slots=True)
class ExchangeGoal:
    """What two pipelines of some have to reach for all to be better, whatever the others do.

    T of a placement is lower, or as low with more micro-batches per second (what the descent lowers), only if the two
    do by T, or before, what the others leave. That takes no longer to tell for many pipelines.

    Attributes:
        seconds: T of all.
        missing: micro-batches that the others cannot do by then.
        missing_before: those that they cannot do before.
        rate: micro-batches per second of the two as they are.
    """

    seconds: float
    missing: int
    missing_before: int
    rate: float

    @classmethod
    def of(cls, pipelines: Sequence[FilledPipeline], total: int, seconds: float, pair: tuple[int, int]) -> ExchangeGoal:
        """Return it for two of some pipelines, which do `total` micro-batches in so many seconds."""
        rest = [one for number, one in enumerate(pipelines) if number not in pair]
        missing = total - sum(micro_batches_within(one, seconds) for one in rest)
        before = total - sum(most_below(one, seconds) for one in rest)
        rate = sum(1 / pipelines[number].bottleneck for number in pair)
        return cls(seconds, missing, before, rate)

    def allows(self, one: FilledPipeline | None, other: FilledPipeline | None) -> bool:
        """Tell whether no bound rules out that these in place of the two are better."""
        if one is None or other is None:
            return False
        if most_below(one, self.seconds) + most_below(other, self.seconds) >= self.missing_before:
            return True
        is_faster = 1 / one.bottleneck + 1 / other.bottleneck > self.rate * _ROUNDED
        return (
            is_faster
            and micro_batches_within(one, self.seconds) + micro_batches_within(other, self.seconds) >= self.missing
        )


def different_pairs(bins: Sequence[Kinds]) -> Iterator[tuple[int, int]]:
    """Yield pairs of positions, one for each pair of different pipelines, slower ones first.

    Pipelines may be exchanged meanwhile, which makes new pairs.
    """
    seen, done = set[tuple[Kinds, Kinds]](), set[Kinds]()
    for i in range(len(bins)):
        first = bins[i]
        for j in range(i + 1, len(bins)) if first not in done else ():
            pair = (bins[i], bins[j]) if bins[i] >= bins[j] else (bins[j], bins[i])
            if pair not in seen:
                seen.add(pair)
                before = bins[i], bins[j]
                yield i, j
                if (bins[i], bins[j]) != before:
                    done.clear()
        if bins[i] == first:
            done.add(first)


def exchanges(one: Kinds, other: Kinds) -> Iterator[tuple[Kinds, Kinds]]:
    """Yield both pipelines after a group of one was moved to the other, or two groups swapped."""
    for mine in (None, *dict.fromkeys(one)):
        for theirs in (None, *dict.fromkeys(other)):
            if mine != theirs:
                yield _replace_kind(one, mine, theirs), _replace_kind(other, theirs, mine)


def _replace_kind(kinds: Kinds, gone: GroupKind | None, new: GroupKind | None) -> Kinds:
    left = list(kinds)
    if gone is not None:
        left.remove(gone)
    return tuple(sorted([*left, *([] if new is None else [new])], reverse=True))


@dataclass(frozen=True, slots=True)
class Placement:
    """Filled pipelines, the micro-batches of each, and their steady seconds T, (2)."""

    pipelines: tuple[FilledPipeline, ...]
    micro_batches: tuple[int, ...]
    seconds: float


class Placer:
    """Finds placements; remembers filled pipelines between calls and says if every search was complete."""

    def __init__(self, situation: MalleusSituation) -> None:
        self._situation = situation
        self.filler = LayerFiller(situation)
        self._steps = Budget(MOST_STEPS)
        self._swaps = Budget(MOST_SWAPS)
        self._parts = Budget(MOST_PARTS)
        self.is_exact = True

    def place(self, kinds: Kinds, limit: float = math.inf) -> Placement | None:
        """Return the best placement of the groups that takes less than `limit` seconds, or None."""
        best = self._descend(_deal(kinds, self._situation.num_pipelines))
        below = limit if best is None else min(limit, best.seconds)
        listing = Listing(self._situation, kinds, self.filler, self._steps)
        while listing.is_complete and (found := listing.find(below)) is not None:
            placed = self._micro_batches(found)
            if placed is None:  # the stages of all pipelines together are more than the micro-batches
                listing.is_complete = False
            else:
                best, below = placed, placed.seconds
        if not listing.is_complete:
            self.is_exact = False
            best = self._recombined(best) if self._situation.num_pipelines > PART else best
        return self._slimmed(best) if best is not None and best.seconds < limit else None

    def _recombined(self, best: Placement | None) -> Placement | None:
        """Search parts of the placement as long as that helps."""
        better = best
        while better is not None:
            best, better = better, next(self._with_better_parts(better), None)
        return best

    def _with_better_parts(self, best: Placement) -> Iterator[Placement]:
        """Yield faster placements that differ in a part."""
        for part in _parts(best):
            if not self._parts.take(1):
                return
            rest = [one for i, one in enumerate(best.pipelines) if i not in part]
            done = [most_below(one, best.seconds) for one in rest]
            missing = self._situation.num_micro_batches - sum(done)
            if missing < len(part) or 0 in done:
                continue
            kinds = sorted((kind for i in part for kind in best.pipelines[i].kinds), reverse=True)
            situation = replace(self._situation, num_pipelines=len(part), num_micro_batches=missing)
            listing = Listing(situation, tuple(kinds), self.filler, Budget(_PART_STEPS))
            found = listing.find(best.seconds) if listing.is_complete else None
            placed = None if found is None else self._micro_batches([*found, *rest])
            if placed is not None and placed.seconds < best.seconds:
                yield placed

    def _slimmed(self, placement: Placement) -> Placement:
        """Leave out groups that T does not need: they would only make pipelines longer to fill."""
        slim = []
        for filled, count in zip(placement.pipelines, placement.micro_batches, strict=True):
            for kind in sorted(filled.kinds, reverse=True):
                less = self.filler.fill(_replace_kind(filled.kinds, kind, None)) if len(filled.kinds) > 1 else None
                is_enough = less is not None and less.bottleneck * count <= placement.seconds
                if less is not None and is_enough and less.fill_seconds < filled.fill_seconds:
                    filled = less
            slim.append(filled)
        return replace(placement, pipelines=tuple(slim))

    def _micro_batches(self, pipelines: Sequence[FilledPipeline | None]) -> Placement | None:
        """Return the placement with (2) solved."""
        filled = [one for one in pipelines if one is not None]
        if len(filled) < len(pipelines):
            return None
        costs, low = [one.bottleneck for one in filled], [len(one.kinds) for one in filled]
        counts = spread_evenly(self._situation.num_micro_batches, costs, low)
        if counts is None:
            return None
        seconds = max(cost * count for cost, count in zip(costs, counts, strict=True))
        return Placement(tuple(filled), counts, seconds)

    def _descend(self, bins: list[Kinds]) -> Placement | None:
        """Move and swap groups between pipelines as long as that helps."""
        best = self._micro_batches([self.filler.fill(kinds) for kinds in bins])
        improved = True
        while improved:
            improved = False
            for i, j in different_pairs(bins):
                better = self._exchange(bins, i, j, best)
                if better is not None:
                    best, improved = better, True
        return best

    def _exchange(self, bins: list[Kinds], i: int, j: int, best: Placement | None) -> Placement | None:
        """Make the best exchange between two pipelines, if one is better than `best`."""
        better, chosen = None, None
        filled: list[FilledPipeline | None] = [*map(self.filler.fill, bins)] if best is None else [*best.pipelines]
        reach = None if best is None else ExchangeGoal.of(best.pipelines, sum(best.micro_batches), best.seconds, (i, j))
        for one, other in exchanges(bins[i], bins[j]):
            if not self._swaps.take(1):
                break
            pair = self.filler.fill(one), self.filler.fill(other)
            if reach is not None and not reach.allows(*pair):
                continue
            tried = [*filled]
            tried[i], tried[j] = pair
            placed = self._micro_batches(tried)
            if placed is not None and _merit(placed) < min(_merit(best), _merit(better)):
                better, chosen = placed, (one, other)
        if chosen is not None:
            bins[i], bins[j] = chosen
        return better


def _merit(placement: Placement | None) -> tuple[float, float]:
    """Return what the descent lowers: T, then the T that micro-batches in parts would give."""
    if placement is None:
        return math.inf, math.inf
    return placement.seconds, -math.fsum(1 / one.bottleneck for one in placement.pipelines)


def _deal(kinds: Kinds, num_pipelines: int) -> list[Kinds]:
    """Deal groups out, fastest first, each to the pipeline of least capacity."""
    hands: list[list[GroupKind]] = [[] for _ in range(num_pipelines)]
    heap = [(0.0, i, 0.0) for i in range(num_pipelines)]  # capacity to rounding, pipeline, capacity
    for kind in sorted(kinds):
        _, least, capacity = heap[0]
        hands[least].append(kind)
        capacity += 1 / kind.seconds
        heapq.heapreplace(heap, (round(capacity, 9), least, capacity))
    return [tuple(sorted(hand, reverse=True)) for hand in hands]


def _parts(placement: Placement) -> Iterator[tuple[int, ...]]:
    """Yield indices of a few pipelines, one choice for each that differs, those that waste most first."""

    def waste(i: int) -> float:
        filled = placement.pipelines[i]
        capacity = math.fsum(1 / kind.seconds for kind in filled.kinds)
        return filled.bottleneck * capacity

    order = sorted(range(len(placement.pipelines)), key=lambda i: (-waste(i), i))
    copies, few = Counter[FilledPipeline](), list[int]()
    for i in order:
        few += [i] if copies[placement.pipelines[i]] < PART else []
        copies[placement.pipelines[i]] += 1
    seen = set()
    for part in combinations(few, PART):
        key = tuple(sorted(placement.pipelines[i].kinds for i in part))
        if key not in seen:
            seen.add(key)
            yield part
