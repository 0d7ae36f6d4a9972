"""Ways between home and those that compute: how parameters are gathered and gradients summed, bucket by bucket.

Replicas whose stages have other borders meet in other groups: blocks that the same stages hold share buckets, each of
about the bytes of the runtime's. Gradients become ready from the last block to the first.

A bucket goes around the rings of those that hold the same of it, one stage of each pipeline: so many seconds as one of
its rings takes alone, or as all of them keep the busiest link. A device takes part in one way after another, in the
order of the buckets; ways of other devices go on meanwhile, and all of them share the links. What is priced here is
what a simulation plays.
"""

from __future__ import annotations

import itertools
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

from hetu_fx.base.once import once
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import BUCKET_BYTES, BUCKETS_AT_ONCE
from hetu_fx.planner.price.link_load import Resource, Traffic, resource_loads, turn_traffic
from hetu_fx.planner.price.placement import tied_holders
from hetu_fx.planner.price.step_end import sync_seconds
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import PARTS, ProgramCosts
from hetu_fx.plans.parts import PartedPipeline
from hetu_fx.plans.plan import Plan, Stage

Ring = tuple[int, ...]

Direction = Literal["gather", "gradients"]
"""From home, or home."""

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

Holders = tuple[int, ...]
"""For every pipeline the number of its part that holds a block."""


Stops = tuple[int, ...]
"""Where the blocks of each part of a pipeline begin, and where the last one's end."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The blocks [start, stop), with what stands before and after them all, and who holds them."""

    start: int
    stop: int
    holders: Holders


def buckets(costs: ProgramCosts, stops: Sequence[Sequence[int]]) -> tuple[Bucket, ...]:
    """Return the buckets of a program from its last block to its first.

    Args:
        costs: of the program.
        stops: where the blocks of each part of a pipeline begin, and where the last one's end; for every pipeline.
    """
    if not costs.num_blocks:
        return (Bucket(0, 0, (0,) * len(stops)),)
    return tuple(_cut(costs, [_holders(block, stops) for block in range(costs.num_blocks)]))


def _holders(block: int, stops: Sequence[Sequence[int]]) -> Holders:
    return tuple(next(i for i, stop in enumerate(own[1:]) if block < stop) for own in stops)


def _cut(costs: ProgramCosts, holders: Sequence[Holders]) -> Iterator[Bucket]:
    stop, filled = costs.num_blocks, 0.0
    for block in reversed(range(costs.num_blocks)):
        size = costs.between(block, block + 1).parameter_bytes
        if block + 1 < stop and (holders[block] != holders[stop - 1] or filled + size > BUCKET_BYTES):
            yield Bucket(block + 1, stop, holders[stop - 1])
            stop, filled = block + 1, 0.0
        filled += size
    yield Bucket(0, stop, holders[0])


def weight_rings(holders: Sequence[Stage]) -> list[Ring]:
    """Return the rings that what these stages hold goes around, one for each part of its weights."""
    columns = [stage.context_groups for stage in holders]
    largest = max(map(len, columns))
    rings = ({rank for column in columns for rank in column[i % len(column)]} for i in range(largest))
    return [tuple(sorted(ring)) for ring in rings]


class HomeWay:
    """The way of what some stages hold, one of each pipeline; `homes` are the plan's shares of homes, if it has some.

    Attributes:
        stages: these.
        is_needed: whether several devices hold the same.
        traffic: what so many bytes as a bucket should have send around all rings.
        loads: for how long that keeps each resource busy.
        busiest: for how long it keeps the busiest resource.
    """

    def __init__(
        self, stages: Sequence[Stage], costs: ProgramCosts, cluster: Cluster, zero: int, homes: Sequence[int] = ()
    ) -> None:
        self.stages, self._costs, self._cluster, self._zero, self._homes = stages, costs, cluster, zero, homes
        own = [(stage, costs.of_groups(stage)) for stage in stages]
        repeats = any(program.repeated_parts > 1 for _, program in own)
        self.is_needed = len(stages) > 1 or stages[0].shares_sequence or repeats
        self._repeating = [(stage, program) for stage, program in own if program.whole.repeated_parameter_bytes]
        self._meetings = _meetings(stages, cluster)
        rings = weight_rings(stages)
        parts = (turn_traffic(ring, BUCKET_BYTES / len(rings), 1 if zero else 2, cluster) for ring in rings)
        self.traffic: Traffic = tuple(itertools.chain.from_iterable(parts))
        self.loads: Mapping[Resource, float] = resource_loads(self.traffic, cluster)
        self.busiest = max(self.loads.values(), default=0.0)

    def share(self, start: int, stop: int) -> float:
        """Return what some blocks have of the bytes that `traffic` sends."""
        return self._costs.between(start, stop).parameter_bytes / BUCKET_BYTES

    def line(self, direction: Direction, start: int, stop: int) -> Line:
        """Return latency, and seconds, of the slowest ring of some blocks, if it has all links for itself."""
        return self._line(direction, *self._costs.alike(start, stop))

    @once
    def _line(self, direction: Direction, start: int, stop: int) -> Line:
        line = reduce(Line.upper, (self._ring_line(direction, *one) for one in set(self._sizes(start, stop))))
        return line + reduce(Line.upper, self._repeated_lines(direction, start, stop), Line())

    def _repeated_lines(self, direction: Direction, start: int, stop: int) -> Iterator[Line]:
        """Yield what parameters take besides of which several devices of a group hold the same part."""
        for stage, costs in self._repeating:
            parts = costs.between(start, stop)
            size = parts.repeated_parameter_bytes if direction == "gather" else parts.late_parameter_bytes
            if size:
                yield self._ring_line(direction, size, stage.repeating(stage.devices[0], costs.repeated_parts))

    def seconds(self, direction: Direction, start: int, stop: int) -> float:
        """Return how long the way of some blocks takes, whatever else uses the links."""
        line = self.line(direction, start, stop)
        return line.fixed + max(line.slope, self.share(start, stop) * self.busiest)

    def _ring_line(self, direction: Direction, size: float, ring: Ring) -> Line:
        line = _ring_line(direction, size, ring, self._cluster, self._zero)
        return Line(line.fixed, line.slope * self._times_equal(ring))

    def _times_equal(self, ring: Ring) -> float:
        """Return how many times as long as with equal homes it takes: who has least at home gets or sends the most."""
        own = [self._homes[rank] for rank in ring] if self._homes else []
        return (1 - min(own) / sum(own)) / (1 - 1 / len(own)) if len(own) > 1 and any(own) else 1.0

    def _sizes(self, start: int, stop: int) -> Iterator[tuple[float, Ring]]:
        """Yield the bytes of blocks on each device, and those that it meets: one of each other stage."""
        for stage, rings in self._meetings:
            held = self.held(stage, start, stop)
            yield from ((held[rank], ring) for ranks, ring in rings for rank in ranks)

    def held(self, stage: Stage, start: int, stop: int) -> dict[int, float]:
        """Return the bytes of blocks' parameters by device of a stage."""
        parts = [self._costs.on(stage, i).between(start, stop) for i in range(len(stage.devices))]
        triples = zip(stage.devices, stage.work_shares, parts, strict=True)
        return {rank: part.parameter_bytes_at(share) for rank, share, part in triples}


Meetings = list[tuple[Stage, list[tuple[Ring, Ring]]]]
"""Of stages, devices that hold the same, and all that these meet."""


def _meetings(stages: Sequence[Stage], cluster: Cluster) -> Meetings:
    """Return for stages the devices that theirs meet, one ring of those that go alike."""
    node_of, known, found = cluster.node_of, set[object](), Meetings()
    firsts = [stage.devices[0] for stage in stages]
    for number, stage in enumerate(stages):
        there, new = [node_of(firsts[number])], list[Ring]()
        for position, rank in enumerate(stage.devices):
            own = (rank, *stage.beside(rank)) if stage.shares_sequence else (rank,)
            here = [node_of(peer) for peer in own]
            key = stage.axes, position, None if here == there else (*there, *here)
            if key not in known:
                known.add(key)
                new.append(own)
        if new:
            others = sorted((*firsts[:number], *firsts[number + 1 :]))
            found.append((stage, list(_rings(new, others, cluster))))
    return found


def _rings(ranks: Iterable[Ring], others: Sequence[int], cluster: Cluster) -> Iterator[tuple[Ring, Ring]]:
    """Yield ranks that hold the same, with those that they meet: the same ring where links know no difference."""
    alike: dict[object, Ring] = {}
    for own in ranks:
        place = tuple([(cluster.likeness(one), cluster.shared_units(one), bisect(others, one)) for one in own])
        if place not in alike:
            alike[place] = tuple(sorted((*others, *own)))
        yield own, alike[place]


def _ring_line(direction: Direction, size: float, ring: Ring, cluster: Cluster, zero: int) -> Line:
    """Return latency, and seconds, of a gather, or of a sum of gradients, of `size` bytes around a ring."""
    term = 1 if direction == "gather" else 0
    empty, full = (sync_seconds(count, ring, cluster, zero)[term] for count in (0.0, size))
    return Line(empty, full - empty)


def tied_ways(
    direction: Direction, costs: ProgramCosts, pipeline: PartedPipeline, cluster: Cluster, zero: int
) -> Iterator[tuple[Ring, Line, Traffic]]:
    """Yield the readers of each parameter that several stages of a pipeline read, and its way among one of each."""
    for one, held in tied_holders(costs, pipeline):
        ring = tuple(dict.fromkeys(part.devices[0] for part in held))
        if len(ring) > 1:  # else they are chunks of one stage
            readers = tuple(dict.fromkeys(rank for part in held for rank in part.devices))
            traffic = turn_traffic(ring, one.bytes, 1 if zero else 2, cluster)
            yield readers, _ring_line(direction, one.bytes, ring, cluster, zero), traffic


@dataclass(frozen=True, slots=True)
class DirectionCosts:
    """What all ways in one direction take.

    Attributes:
        seconds: until the last has ended, if each device takes part in one at a time.
        by_device: of each device's.
        link_seconds: for how long they keep the busiest link.
        at_once: in how many of them a device takes part at once, in a step.
    """

    seconds: float
    by_device: Mapping[int, float]
    link_seconds: float = 0.0
    at_once: int = 1

    @property
    def overlapped_seconds(self) -> float:
        """Return what they take if each device takes part in several at once."""
        return max(self.seconds / self.at_once, self.link_seconds)


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """A unit that is gathered by itself: its share of the work, and the seconds of its gather and of its gradients."""

    work: float
    gather: float
    gradients: float


def seconds_beside_units(units: Sequence[UnitCosts], forward: float, backward: float) -> float:
    """Return what gathers of units, and gradients of them, add to a step's forward and backward (zero 3).

    While a unit is computed the next one is gathered; in backward gradients of the one before travel too, on the same
    links. So it is the first gather, the last gradients, and all that a unit's work does not hide.
    """
    ahead = (max(0.0, following.gather - one.work * forward) for one, following in itertools.pairwise(units))
    gathers, gradients = [0.0, *(one.gather for one in units)], [*(one.gradients for one in units[1:]), 0.0]
    back = (max(0.0, g + r - one.work * backward) for one, g, r in zip(units, gathers, gradients, strict=False))
    return units[0].gather + sum(ahead) + sum(back) + units[0].gradients


class Ways:
    """All ways of a plan; `kinds` is where the parts of unlike pipelines begin, in the order of a bucket's holders."""

    def __init__(self, plan: Plan, costs: ProgramCosts, cluster: Cluster) -> None:
        """`costs` are those under the plan. Raises `PlanError` where the plan does not fit so many blocks."""
        self._plan, self._costs, self._cluster = plan, costs, cluster
        self._pipelines = plan.parts(costs.num_blocks)
        self.kinds: list[Stops] = list(dict.fromkeys(pipeline.stops for pipeline in self._pipelines))
        self._buckets = buckets(costs, self.kinds)
        self._ways = {holders: self._new_way(holders) for holders in dict.fromkeys(b.holders for b in self._buckets)}
        self._members = {
            holders: [rank for stage in way.stages for rank in stage.devices] for holders, way in self._ways.items()
        }

    def ends(self, direction: Direction) -> DirectionCosts:
        """Return what all ways in one direction take, if devices do nothing else."""
        if direction == "gather" and not self._plan.zero:
            return DirectionCosts(0.0, {})
        free, spent, done = dict[int, float](), defaultdict[int, float](float), [0.0]
        travelling = self._travelling(direction)
        busy = self._busy(travelling)
        turns = [(self._members[one.holders], self._seconds_of(direction, one)) for one in travelling]
        for ranks, seconds in (*turns, *self._tied(direction)):
            done.append(max(free.get(rank, 0.0) for rank in ranks) + seconds)
            free |= dict.fromkeys(ranks, done[-1])
            for rank in ranks:
                spent[rank] += seconds
        link_seconds = max(busy.values(), default=0.0)
        at_once, waits = min(BUCKETS_AT_ONCE, len(self._buckets)), self._with_waits(spent, busy, direction)
        times = 2 if direction == "gather" and self._plan.gathers_units else 1  # again for the backward
        waits = {rank: times * seconds for rank, seconds in waits.items()}
        return DirectionCosts(times * max([*done, link_seconds]), waits, times * link_seconds, at_once)

    def units(self) -> list[UnitCosts]:
        """Return the units that a plan gathers one by one: the blocks, of which the ends have what stands there."""
        way, count = self._ways[self._buckets[0].holders], self._costs.num_blocks
        cuts, share = ([(k, k + 1) for k in range(count)], 1.0) if count else ([(0, 0)] * PARTS, 1 / PARTS)
        work = [self._costs.between(*cut).flops for cut in cuts]
        total = sum(work) or 1.0
        lines = [[way.seconds(direction, *cut) * way.is_needed * share for cut in cuts] for direction in DIRECTIONS]
        return [UnitCosts(flops / total, *ends) for flops, *ends in zip(work, *lines, strict=True)]

    def arrival_home(self, ready: Callable[[Bucket], float]) -> float:
        """Return when all gradients are home, each bucket of which is ready at some time; 0 where none travel.

        Links are shared as if each had room for all that comes after the first bucket is ready.
        """
        travelling = self._travelling("gradients")
        done = [0.0, *(ready(bucket) + self._seconds_of("gradients", bucket) for bucket in travelling)]
        first = min(map(ready, travelling), default=0.0)
        done += [first + seconds for seconds in self._busy(travelling).values()]
        return max(done) + max((seconds for _, seconds in self._tied("gradients")), default=0.0)

    def _busy(self, travelling: Iterable[Bucket]) -> dict[Resource, float]:
        """Return for how long some buckets keep each resource."""
        shares, busy = defaultdict[Holders, float](float), defaultdict[Resource, float](float)
        for bucket in travelling:
            shares[bucket.holders] += self._ways[bucket.holders].share(bucket.start, bucket.stop)
        for holders, share in shares.items():
            for resource, load in self._ways[holders].loads.items():
                busy[resource] += share * load
        return busy

    def _seconds_of(self, direction: Direction, bucket: Bucket) -> float:
        return self._ways[bucket.holders].seconds(direction, bucket.start, bucket.stop)

    def _travelling(self, direction: Direction) -> list[Bucket]:
        """Return the buckets that travel, in order."""
        found = [bucket for bucket in self._buckets if self._ways[bucket.holders].is_needed]
        return found[::-1] if direction == "gather" else found

    def _with_waits(
        self, spent: Mapping[int, float], busy: Mapping[Resource, float], direction: Direction
    ) -> Mapping[int, float]:
        """Return the seconds of each device, not less than the links that its ways use are busy."""
        found = dict(spent)
        for holders in dict.fromkeys(bucket.holders for bucket in self._travelling(direction)):
            least = max((busy[resource] for resource in self._ways[holders].loads), default=0.0)
            found |= {rank: max(least, found[rank]) for rank in self._members[holders]}
        return found

    def _new_way(self, holders: Holders) -> HomeWay:
        of_kind = dict(zip(self.kinds, holders, strict=True))
        parts = [pipeline.parts[of_kind[pipeline.stops]] for pipeline in self._pipelines]
        return HomeWay(parts, self._costs, self._cluster, self._plan.zero, self._plan.homes)

    def _tied(self, direction: Direction) -> Iterator[tuple[Sequence[int], float]]:
        """Yield the devices and seconds of the way of each parameter that several stages of a pipeline read."""
        for pipeline in self._pipelines:
            ways = tied_ways(direction, self._costs, pipeline, self._cluster, self._plan.zero)
            for readers, line, traffic in ways:
                busiest = max(resource_loads(traffic, self._cluster).values(), default=0.0)
                yield readers, line.fixed + max(line.slope, busiest)
