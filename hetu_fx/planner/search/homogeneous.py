"""The best homogeneous plan: every number of pipelines x group size x stages x micro-batches x recompute x ZeRO.

Pipelines are equal, stages as even as blocks can be, shards even, as Megatron-LM has them (Narayanan et al., Efficient
Large-Scale Language Model Training on GPU Clusters, SC 2021). Groups stand side by side in the order of the nodes or of
the speeds, either pipeline after pipeline or, as there, stage after stage. Of numbers of stages with the same largest
stage the least is tried, besides those that leave no device over: the others are slower and hold as much. Of what may
be recomputed the least that fits memory is tried: more takes longer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.search.contiguous import replica_counts
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.estimates import Estimates, rules_of
from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.planner.search.replica import Family, Replica, ReplicaRules, ReplicaRun
from hetu_fx.plans.plan import Pipeline, Plan, Stage

FEW_DEVICES = 32
"""In clusters up to so many devices, plans that leave devices over are tried too."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """How devices are cut: pipelines side by side, stages of each, devices of a stage."""

    pipelines: int
    stages: int
    group: int

    def __str__(self) -> str:
        return f"{self.pipelines} pipelines of {self.stages} stages of {self.group} devices"


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
        starts = ((first + stage * step) * d.group for stage in range(d.stages))
        return tuple([self.order[start : start + d.group] for start in starts])


@dataclass(frozen=True, slots=True)
class TimedArrangement:
    """An arrangement, run in so many micro-batches, and the seconds that it is estimated to take."""

    seconds: float
    arrangement: Arrangement
    micro_batches: int
    zero: int

    @property
    def degrees(self) -> Degrees:
        """Return how devices are cut."""
        return self.arrangement.degrees

    def plan(self, problem: Problem) -> Plan:
        """Return the plan."""
        groups = (self.arrangement.groups(i) for i in range(self.degrees.pipelines))
        pipelines = (Pipeline(tuple(map(Stage, found)), micro_batches=self.micro_batches) for found in groups)
        return replace(problem.plan(pipelines), zero=self.zero).with_blocks(problem.costs.num_blocks)


def candidates(problem: Problem) -> Iterator[TimedArrangement]:
    """Yield every homogeneous plan that is estimated to fit."""
    rules = [rules_of(problem, zero) for zero in range(problem.options.zero + 1)]
    estimates = Estimates(problem.costs, problem.cluster, rules[-1])
    found = False
    for arrangement in _arrangements(problem):
        if problem.time_limit.ends(found):
            return
        replicas = _replicas(arrangement, problem.costs.num_blocks, estimates)
        firsts = [arrangement.groups(i)[0][0] for i in range(arrangement.degrees.pipelines)]
        last = arrangement.groups(0)[-1][-1]
        for given in rules:
            end = estimates.ends(replicas, firsts, last, given.zero)
            for way in _ways(replicas, arrangement.degrees, problem.costs.rows, given):
                found = True
                yield TimedArrangement(way.seconds + end, arrangement, way.micro_batches, given.zero)


def _replicas(arrangement: Arrangement, num_blocks: int, estimates: Estimates) -> list[Replica]:
    """Return the pipelines that differ."""
    blocks = Pipeline(tuple(map(Stage, arrangement.groups(0)))).blocks(num_blocks)
    found = (estimates.replica(arrangement.groups(i), blocks) for i in range(arrangement.degrees.pipelines))
    return list({id(replica): replica for replica in found}.values())


def _ways(replicas: Sequence[Replica], degrees: Degrees, total: int, rules: ReplicaRules) -> Iterator[ReplicaRun]:
    """Yield the ways to run pipelines that fit memory, as the slowest of them takes."""
    rows = math.ceil(total / degrees.pipelines)
    counts = {min(count, rows): count for count in reversed(rules.micro_batches)}
    asked = replace(rules, micro_batches=tuple(sorted(counts.values())))
    found = [Family.of(replica, degrees.pipelines, asked).ways(rows) for replica in replicas]
    for count in sorted(counts):
        ways = [way for own in found for way in own if min(way.micro_batches, rows) == count]
        if len(ways) == len(replicas):
            slowest = max(ways, key=lambda way: way.seconds)
            yield replace(slowest, micro_batches=count)


def _arrangements(problem: Problem) -> Iterator[Arrangement]:
    """Yield the arrangements to try."""
    for degrees in _all_degrees(problem):
        for order in orders(problem.cluster):
            yield Arrangement(degrees, order)
            if min(degrees.pipelines, degrees.stages) > 1:
                yield Arrangement(degrees, order, by_stage=True)


def orders(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return the devices node by node, and from fast to slow if that is another order."""
    by_node = sorted(cluster.devices, key=lambda device: (cluster.order(device.rank), device.rank))
    by_speed = sorted(by_node, key=lambda device: -device.speed)
    return tuple(dict.fromkeys(tuple(device.rank for device in order) for order in (by_node, by_speed)))


def _all_degrees(problem: Problem) -> Iterator[Degrees]:
    """Yield the degrees to try."""
    count, options, costs = len(problem.cluster.devices), problem.options, problem.costs
    units = costs.units if options.tensor_parallel else 1
    for group in (size for size in range(1, min(count, units) + 1) if units % size == 0):
        for stages in stage_counts(count // group, costs.num_blocks if options.pipelines else 1):
            most = 1 if "data_parallel" in options.off else min(costs.rows, count // (group * stages))
            for pipelines in replica_counts(most) if count <= FEW_DEVICES else (most,):
                yield Degrees(pipelines, stages, group)


def stage_counts(groups: int, num_blocks: int) -> list[int]:
    """Return the numbers of stages that differ in their largest stage, or leave no group over."""
    most = max(1, min(groups, num_blocks))
    least = {math.ceil(num_blocks / count): count for count in range(most, 0, -1)}
    return sorted({*least.values(), *(count for count in range(1, most + 1) if groups % count == 0)})


def finalists(num_devices: int) -> int:
    """Return how many of the best plans by estimate are priced; the price of one grows faster than the devices."""
    return max(2, min(64, 1024 // num_devices))


def best_priced(found: Iterable[Plan], problem: Problem, most: int) -> dict[Plan, float]:
    """Return the first so many plans that fit and may be, with their seconds by the cost model."""
    fitting: dict[Plan, float] = {}
    for plan in dict.fromkeys(itertools.islice(problem.options.allowed(found), 4 * most)):
        if len(fitting) == most or problem.time_limit.ends(fitting):
            break
        priced = problem.fitted(plan)
        fitting |= [] if priced is None else [priced]
    return fitting


def _find(problem: Problem) -> Candidates:
    problem.tell("homogeneous: pipelines x stages x devices of a stage x micro-batches")
    found = sorted(candidates(problem), key=lambda candidate: candidate.seconds)
    plans = (candidate.plan(problem) for candidate in found)
    return best_priced(plans, problem, finalists(len(problem.cluster.devices)))


HOMOGENEOUS = Search(
    name="homogeneous",
    applies="always: equal pipelines of even stages and shards, all of them gone through",
    lacks=lambda problem: "",
    find=_find,
)
