"""The best homogeneous plan: pipelines x stages x group size x parts of a sequence x micro-batches x recompute x ZeRO.

Pipelines are equal, stages as even as blocks can be, shards even, as Megatron-LM has them (Narayanan et al., Efficient
Large-Scale Language Model Training on GPU Clusters, SC 2021). Groups stand side by side in the order of the nodes or of
the speeds, either pipeline after pipeline or, as there, stage after stage. Of numbers of stages with the same largest
stage the least is tried, besides those that leave no device over: the others are slower and hold as much. Of what may
be recomputed the least that fits memory is tried: more takes longer. Sequences are shared where that is worth trying
(`search.manners`): by as few devices as let a plan fit without recomputing, and leave no device without rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Protocol

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.stage_seconds import FORWARD_AND_BACKWARD
from hetu_fx.planner.search.contiguous import replica_counts
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.estimates import Estimates, replica_rules
from hetu_fx.planner.search.manners import (
    IN_SEQUENCE,
    PLAIN,
    SequenceMode,
    attentions,
    contexts,
    shared_between_products,
    shared_throughout,
)
from hetu_fx.planner.search.problem import WORTH, Candidates, Problem, Search, in_all_splits
from hetu_fx.planner.search.replica import Family, Replica, ReplicaRun, micro_rows
from hetu_fx.planner.search.stage_estimates import ReplicaRules
from hetu_fx.planner.search.step_ends import NO_END
from hetu_fx.plans.plan import Pipeline, Plan, Stage

RUNNER_UP_SLACK = 1.25
"""Plans that must be so much slower than the best one found are not worth naming as runner-up."""

FEW_DEVICES = 32
"""In clusters up to so many devices, plans that leave devices over are tried too."""

LEAST_OF_SEARCH = 16
"""So many plans of a search are priced whatever they are estimated to take: where links are slow that is too much."""


class PlanBounds:
    """What equal pipelines take and hold at the least, known before any of them is built.

    With S stages of n devices each, and up to m micro-batches, a pipeline of x rows takes no less than its work on its
    fastest devices with the ramp of the pipeline, and its first stage holds parameters, gradients and, of the min(m, S)
    micro-batches that are under way there, what enters each block or what a block keeps, whichever is less:

        seconds >= work(x) / (S n speed) (m + S - 1) / m                                                        (1)
        seconds >= work of the least x and blocks of a stage / (n speed of the slowest)                         (1')
        bytes >= 2 P / (S g) + min(m, S) ceil(x / m) blocks / S min(boundary, kept / g) / c                      (2)

    for groups of g devices of which c share the sequence. Stages are equal, so that in (1') the slowest device counts;
    it is no faster than that of as many of the fastest as the plan has.
    """

    def __init__(self, problem: Problem) -> None:
        costs, devices = problem.costs, problem.cluster.devices
        self._costs, self._most_counted = costs, problem.options.micro_batches[-1]
        self._speeds = sorted((device.speed for device in devices), reverse=True)
        self._room = problem.options.memory_fraction * max(device.memory_bytes for device in devices)
        self._least_flops = min((block.flops for block in costs.blocks), default=0.0)
        self._entering = min(costs.boundary_bytes, default=0.0)  # a block, per row
        self._kept = min((block.activation_bytes for block in costs.blocks), default=0.0)

    def seconds(self, pipelines: int, stages: int, size: int) -> float:
        """Return (1) or (1'), whichever is more, for the rows of a step over so many pipelines."""
        rows, costs = math.ceil(self._costs.rows / pipelines), self._costs
        work, speeds = FORWARD_AND_BACKWARD * costs.whole.flops * rows, self._speeds
        ramped = work / (stages * size * speeds[0]) * (1 + (stages - 1) / self._most_micro_batches(rows))
        least = FORWARD_AND_BACKWARD * self._least_flops * (costs.num_blocks // stages) * (costs.rows // pipelines)
        return max(ramped, least / (size * speeds[min(len(speeds), pipelines * stages * size) - 1]))

    def fits(self, pipelines: int, stages: int, group: int, context: int) -> bool:
        """Tell whether (2) fits the largest device."""
        costs, rows = self._costs, math.ceil(self._costs.rows / pipelines)
        count = self._most_micro_batches(rows)
        each = min(self._entering, self._kept / group) * math.ceil(rows / count) / context
        under_way = min(count, stages) * costs.num_blocks / stages * each
        return 2 * costs.for_group(group).whole.parameter_bytes_at(1 / group) / stages + under_way <= self._room

    def _most_micro_batches(self, rows: int) -> int:
        return min(rows, self._most_counted)


@dataclass(frozen=True, slots=True)
class Degrees:
    """How devices are cut: pipelines side by side, stages of each, groups that share a sequence, devices of a group.

    `lacks_rows`: more pipelines would fit the devices, but there are no more rows.
    """

    pipelines: int
    stages: int
    group: int
    context: int = 1

    lacks_rows: bool = False

    @property
    def size(self) -> int:
        """Return the devices of a stage."""
        return self.group * self.context

    def least_seconds(self, bounds: PlanBounds) -> float:
        """Return a bound below which no such plan is."""
        return bounds.seconds(self.pipelines, self.stages, self.size)

    def may_fit(self, bounds: PlanBounds) -> bool:
        """Tell whether no bound rules out that such a plan fits memory."""
        return bounds.fits(self.pipelines, self.stages, self.group, self.context)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Degrees on the first devices of an order, pipeline after pipeline or stage after stage."""

    degrees: Degrees
    order: tuple[int, ...]
    by_stage: bool = False

    def groups(self, pipeline: int) -> Groups:
        """Return the stages of a pipeline."""
        d = self.degrees
        first, step = (pipeline, d.pipelines) if self.by_stage else (pipeline * d.stages, 1)
        starts = ((first + stage * step) * d.size for stage in range(d.stages))
        return tuple([self.order[start : start + d.size] for start in starts])


@dataclass(frozen=True, slots=True)
class TimedArrangement:
    """An arrangement, run in so many micro-batches, and the seconds that it is estimated to take."""

    seconds: float
    arrangement: Arrangement
    run: ReplicaRun
    zero: int
    manner: SequenceMode = PLAIN

    @property
    def micro_batches(self) -> int:
        """Return how many micro-batches each pipeline runs."""
        return self.run.micro_batches

    @property
    def degrees(self) -> Degrees:
        """Return how devices are cut."""
        return self.arrangement.degrees

    def plan(self, problem: Problem) -> Plan:
        """Return the plan."""
        groups = [self.arrangement.groups(i) for i in range(self.degrees.pipelines)]
        blocks = Pipeline(tuple(map(Stage, groups[0]))).blocks(problem.costs.num_blocks)
        pairs, context = [list(zip(found, blocks, strict=True)) for found in groups], self.degrees.context
        stages = (tuple([Stage(devices, (), count, context) for devices, count in found]) for found in pairs)
        pipelines = (Pipeline(found, micro_batches=self.micro_batches) for found in stages)
        return self.manner.of(replace(problem.plan(pipelines), zero=self.zero))


def candidates(problem: Problem, manner: SequenceMode = PLAIN) -> Iterator[TimedArrangement]:
    """Yield the homogeneous plans that are estimated to fit and may be near the best, also of what has been priced.

    None is context parallel.
    """
    trial, bounds = _Estimating(problem, manner), PlanBounds(problem)
    best = math.inf
    for degrees in sorted(_all_degrees(problem), key=lambda one: one.least_seconds(bounds)):
        if problem.time_limit.ends(best < math.inf):
            return
        limit = min(best * RUNNER_UP_SLACK, problem.priced.worth_seconds)
        if degrees.least_seconds(bounds) <= limit and degrees.may_fit(bounds):
            for found in trial.of(degrees):
                best = min(best, found.seconds)
                yield found


def _context_candidates(problem: Problem) -> Iterator[TimedArrangement]:
    """Yield homogeneous plans whose stages share the sequence, by as few devices as are enough."""
    trial_of, bounds = cache(partial(_Estimating, problem)), PlanBounds(problem)
    best = math.inf
    for family in sorted(_context_degrees(problem), key=lambda one: min(d.least_seconds(bounds) for d in one)):
        if problem.time_limit.ends(best < math.inf):
            return
        for degrees in family:
            limit = min(best * RUNNER_UP_SLACK, problem.priced.worth_seconds)
            if degrees.least_seconds(bounds) > limit or not degrees.may_fit(bounds):
                continue
            found: list[TimedArrangement] = []
            for attention in attentions(degrees.group, degrees.context, problem):
                found += trial_of(SequenceMode(degrees.context, attention)).of(degrees)
            if not _is_roomy(found):
                found += trial_of(SequenceMode(degrees.context, "ring")).of(degrees)
            best = min([best, *(one.seconds for one in found)])
            yield from found
            if _is_roomy(found) and not degrees.lacks_rows:
                break


def _is_roomy(found: Iterable[TimedArrangement]) -> bool:
    """Tell whether some plan recomputes nothing."""
    return any(not any(candidate.run.recompute) for candidate in found)


class _Estimating:
    """Estimates plans that share sequences in one manner."""

    def __init__(self, problem: Problem, manner: SequenceMode) -> None:
        self._problem, self._manner = problem, manner
        self._rules = [replica_rules(problem, zero) for zero in range(problem.options.zero + 1)]
        self._orders = orders(problem.cluster)
        costs = manner.costs(problem.costs)
        self._estimates = Estimates(costs, problem.cluster, self._rules[-1], manner.shape)

    def of(self, degrees: Degrees) -> Iterator[TimedArrangement]:
        """Yield the ways to run so many pipelines that are estimated to fit, near the best that has been priced."""
        by_stage = (False, True) if min(degrees.pipelines, degrees.stages) > 1 else (False,)
        for order, way in itertools.product(self._orders, by_stage):
            arrangement = Arrangement(degrees, order, way)
            if self._least_seconds(arrangement) <= self._problem.priced.worth_seconds:
                yield from self._timed(arrangement)

    def _least_seconds(self, arrangement: Arrangement) -> float:
        """Return a bound that no way is below, of the first pipeline and the last, if hand-overs are hidden."""
        count, rows = arrangement.degrees.pipelines, self._problem.costs.rows
        ends = arrangement.groups(0), arrangement.groups(count - 1)
        return max(self._estimates.least_seconds(groups, rows // count, hands_over=False) for groups in ends)

    def _timed(self, arrangement: Arrangement) -> Iterator[TimedArrangement]:
        costs, degrees = self._problem.costs, arrangement.degrees
        groups, ends = [arrangement.groups(i) for i in range(degrees.pipelines)], self._estimates.ends
        unlike = _replicas(groups, costs.num_blocks, self._estimates)
        found = [self._estimates.hand_overs.among(groups, replica) for replica in unlike]
        replicas, shared = [replica for replica, _ in found], max(crossing for _, crossing in found)
        firsts, lasts = [one[0] for one in groups], [one[-1] for one in groups]
        rows, held = costs.rows // degrees.pipelines, ends.held(groups, replicas[0])
        crossing = rows * shared
        for given in self._rules if len(groups) * degrees.context > 1 else self._rules[-1:]:
            ways = list(_ways(replicas, degrees, costs.rows, given))
            end = ends.of(replicas, firsts, lasts, given.zero, ends.links([held], given.zero)) if ways else NO_END
            lines = [line for replica in replicas for line in end.late(replica)] if ways else []
            for way in ways:
                least = crossing + replicas[0].latency(rows, way.micro_batches) if crossing else 0.0
                late = max(line(micro_rows(rows, way.micro_batches)) for line in lines)
                seconds = max(way.seconds, least) + end.seconds(late)
                yield TimedArrangement(seconds, arrangement, way, given.zero, self._manner)


def _replicas(groups: Sequence[Groups], num_blocks: int, estimates: Estimates) -> list[Replica]:
    """Return the pipelines that differ."""
    blocks = Pipeline(tuple(map(Stage, groups[0]))).blocks(num_blocks)
    found = (estimates.replica(one, blocks) for one in groups)
    return list({id(replica): replica for replica in found}.values())


def _ways(replicas: Sequence[Replica], degrees: Degrees, total: int, rules: ReplicaRules) -> Iterator[ReplicaRun]:
    """Yield the ways to run pipelines that fit memory, as the slowest of them takes."""
    rows = math.ceil(total / degrees.pipelines)
    counts = {min(count, rows): count for count in reversed(rules.micro_batches)}
    asked = replace(rules, micro_batches=tuple(sorted(counts.values())))
    found = [Family(replica, degrees.pipelines, asked).ways(rows) for replica in replicas]
    for count in sorted(counts):
        ways = [way for own in found for way in own if min(way.micro_batches, rows) == count]
        if len(ways) == len(replicas):
            slowest = max(ways, key=lambda way: way.seconds)
            yield replace(slowest, micro_batches=count)


def orders(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return the devices node by node, and from fast to slow if that is another order."""
    by_node = sorted(cluster.devices, key=lambda device: (cluster.order(device.rank), device.rank))
    by_speed = sorted(by_node, key=lambda device: -device.speed)
    return tuple(dict.fromkeys(tuple(device.rank for device in order) for order in (by_node, by_speed)))


def _all_degrees(problem: Problem) -> Iterator[Degrees]:
    """Yield the degrees to try."""
    count = len(problem.cluster.devices)
    for group, stages in _stages_of(problem):
        most = 1 if "data_parallel" in problem.options.off else min(problem.costs.rows, count // (group * stages))
        for pipelines in replica_counts(most) if count <= FEW_DEVICES else (most,):
            yield Degrees(pipelines, stages, group)


def _context_degrees(problem: Problem) -> Iterator[list[Degrees]]:
    """Yield the degrees with which sequences are shared, those together that differ in by how many."""
    count, rows = len(problem.cluster.devices), problem.costs.rows
    for group, stages in _stages_of(problem):
        at_once = count // (group * stages)
        pairs = [(context, at_once // context) for context in contexts(at_once, problem)]
        found = [Degrees(min(rows, most), stages, group, context, rows < most) for context, most in pairs]
        yield from [found] if found else []


def _stages_of(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield the sizes of tensor parallel groups and the numbers of stages to try."""
    count, options, costs = len(problem.cluster.devices), problem.options, problem.costs
    for group in costs.group_sizes(count if options.tensor_parallel else 1):
        for stages in stage_counts(count // group, costs.num_blocks if options.pipelines else 1):
            yield group, stages


def stage_counts(groups: int, num_blocks: int) -> list[int]:
    """Return the numbers of stages that differ in their largest stage, or leave no group over."""
    most = max(1, min(groups, num_blocks))
    least = {math.ceil(num_blocks / count): count for count in range(most, 0, -1)}
    return sorted({*least.values(), *(count for count in range(1, most + 1) if groups % count == 0)})


def finalists(num_devices: int) -> int:
    """Return how many of the best plans by estimate are priced: fewer where the price of one takes long."""
    return max(2, min(64, 2048 // num_devices), min(num_devices // 2, 48, 49152 // num_devices))


class PlanEstimate(Protocol):
    """A plan that has not been made yet, and the seconds that it is estimated to take."""

    @property
    def seconds(self) -> float:
        """Return the seconds."""
        ...

    def plan(self, problem: Problem) -> Plan:
        """Return the plan."""
        ...


def price_best_plans(found: Iterable[PlanEstimate], problem: Problem) -> dict[Plan, float]:
    """Return the plans that are expected to be the fastest and fit, with their seconds by the cost model.

    As many as a cluster of that size allows; in larger ones, from some on, those near the best that has been priced.
    """
    fitting: dict[Plan, float] = {}
    count = len(problem.cluster.devices)
    most = finalists(count)
    least = most if count <= FEW_DEVICES else LEAST_OF_SEARCH
    plans = _plans_worth_pricing(sorted(found, key=lambda one: one.seconds), problem, least)
    for plan in itertools.islice(problem.options.allowed(plans), 4 * most):
        priced = problem.fit_memory(plan)
        fitting |= [] if priced is None else [priced]
        if len(fitting) == most or problem.time_limit.ends(fitting):
            break
    return fitting


def _plans_worth_pricing(found: Iterable[PlanEstimate], problem: Problem, least: int) -> Iterator[Plan]:
    """Yield plans that differ, fastest first, `least` and all near the best, expected or priced meanwhile."""
    made, worth = set[Plan](), 0.0
    for one in found:
        worth = worth or WORTH * one.seconds
        if len(made) >= least and one.seconds > max(worth, problem.priced.worth_seconds):
            break
        plan = one.plan(problem)
        if plan not in made:
            made.add(plan)
            yield plan


def _find(problem: Problem) -> Candidates:
    problem.tell("homogeneous: pipelines x stages x devices of a stage x micro-batches")
    found = price_best_plans(candidates(problem), problem)
    if shared_between_products(problem, found):
        found |= price_best_plans(candidates(problem, IN_SEQUENCE), problem)
    if shared_throughout(problem, found):
        problem.tell("homogeneous: the same with sequences shared")
        found |= price_best_plans(_context_candidates(problem), problem)
    return found


HOMOGENEOUS = Search(
    name="homogeneous",
    applies="always: equal pipelines of even stages and shards, all of them gone through",
    lacks=lambda problem: "",
    find=in_all_splits(_find),
)
