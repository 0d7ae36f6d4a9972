"""Pipelines that searches compare: priced stage by stage, with ratios and blocks by what their devices are.

Devices that are alike are a class. What a stage takes depends on the classes of its devices and on which of them share
a node, so that equal stages are priced once, by the functions of the cost model, in a cluster of their own devices.
Numbers are those of `predict` but for which device of a stage stands for it in gradient syncs; what a search chooses by
them is priced by `predict` at its end.

Blocks go to the stages of a pipeline so that they end together, within what their devices can hold; a stage recomputes
what it has to. Blocks that are all alike are dealt, those that differ cut (`search.allocate`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from hetu_fx.base.once import once
from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.planner.price.link_load import hand_over_line
from hetu_fx.planner.search.allocate import Alike, RangeSeconds, deal, least_passing, min_max_ranges
from hetu_fx.planner.search.device_orders import GroupKinds, Groups, devices_by_likeness
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.replica import Family, Passing, Replica
from hetu_fx.planner.search.stage_estimates import ReplicaRules, StageEstimate, StageRun, stage_estimate
from hetu_fx.planner.search.step_ends import StepEnds
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Stage

_FEWEST = 2  # blocks, of which one stands at neither end if there are more

_OTHER = 1.25
"""Blocks that are balanced for slower numbers of micro-batches, up to this factor, may be the best for faster ones."""

_ROUNDED = 1 - 1e-9  # so much of a bound is one however it is rounded

Blocks = tuple[int, ...]
"""How many blocks each stage of a pipeline has."""


def replica_rules(problem: Problem, zero: int) -> ReplicaRules:
    """Return what holds for the replicas of a problem's plans."""
    options = problem.options
    rooms = [
        (alike, int(alike.memory_bytes * options.memory_fraction)) for alike in devices_by_likeness(problem.cluster)
    ]
    memory = {device.rank: room for alike, room in rooms for device in alike.devices}
    return ReplicaRules(options.schedule, zero, options.micro_batches, memory, options.recompute)


Shape = Callable[[Sequence[Device]], Stage]
"""How devices share a stage."""


def even(devices: Sequence[Device]) -> Stage:
    """Return a tensor parallel stage of equal shards."""
    return Stage(device_ranks(devices))


def device_ranks(devices: Iterable[Device]) -> tuple[int, ...]:
    """Return the ranks of devices, in order."""
    return tuple(device.rank for device in devices)


class Estimates:
    """What stages and pipelines take, and the blocks that let stages end together; each is worked out once."""

    def __init__(
        self,
        costs: ProgramCosts,
        cluster: Cluster,
        rules: ReplicaRules,
        shape: Shape = even,
    ) -> None:
        """Groups are stages as `shape` says."""
        self._costs, self._cluster, self._rules, self._shape = costs, cluster, rules, shape
        self.kinds = GroupKinds(cluster, rules.memory)
        self.hand_overs = HandOvers(costs, cluster, self.kinds)
        self.ends = StepEnds(costs, cluster, self._sharing)
        by_speed = sorted(cluster.devices, key=lambda device: (device.speed, -device.rank))
        self._fastest = {device.kind: device for device in by_speed}
        self._stages: dict[Hashable, StageEstimate] = {}
        self._replicas: dict[Hashable, Replica] = {}
        self._families: dict[Hashable, Family | None] = {}
        self._bounds: dict[Hashable, tuple[tuple[float, int], ...]] = {}
        self._seconds: dict[Hashable, dict[tuple[int, int], float]] = {}
        self._rings: dict[Hashable, tuple[int, ...]] = {}

    @property
    def takes_turns(self) -> bool:
        """Tell whether no more micro-batches than stages are under way in a pipeline."""
        return self._rules.schedule == "1f1b"

    def family(self, groups: Groups, num_replicas: int, rows: int) -> Family | None:
        """Return the fastest pipeline of these stages for so many rows, equal ones as one object; None if none fits.

        It is that of those whose blocks are balanced for each number of micro-batches of their rows.
        """
        key = (self.kinds.key(groups), num_replicas, rows)
        if key in self._families:
            return self._families[key]
        best, found = None, set[Blocks]()
        for bound, count in sorted(self.bounds(groups, rows)):
            if best is not None and bound > _OTHER * best.seconds(rows):
                break
            micro_rows = math.ceil(rows / count)
            blocks = self.blocks(groups, num_replicas, (micro_rows, count), micro_rows)
            if blocks is not None and blocks not in found:
                found.add(blocks)
                family = Family(self.replica(groups, blocks), num_replicas, self._rules)
                best = family if best is None else min(best, family, key=lambda one: one.seconds(rows))
        self._families[key] = best
        return best

    def least_seconds(self, groups: Groups, rows: int, *, hands_over: bool = True) -> float:
        """Return seconds that no pipeline of these stages is below for so many rows; they take little to work out."""
        return min(bound for bound, _ in self.bounds(groups, rows, hands_over=hands_over))

    def bounds(self, groups: Groups, rows: int, *, hands_over: bool = True) -> tuple[tuple[float, int], ...]:
        """Return such seconds for each number of micro-batches; 0 where blocks differ.

        They leave out memory.
        """
        key = self.kinds.key(groups), rows, hands_over
        if key not in self._bounds:
            self._bounds[key] = tuple(self._new_bounds(groups, rows, hands_over))
        return self._bounds[key]

    def _new_bounds(self, groups: Groups, rows: int, hands_over: bool) -> Iterator[tuple[float, int]]:
        stages = Counter(self._block_lines(groups)).items()
        edges = self.hand_overs.edges(groups, range(1, len(groups))) if hands_over and stages else []
        for count in sorted({min(one, rows) for one in self._rules.micro_batches}):
            micro_rows = math.ceil(rows / count)
            lines = [(Line(besides(micro_rows), each(micro_rows)), number) for (besides, each), number in stages]
            sent = 2 * sum(edge(micro_rows) for edge in edges)
            yield (self._least_passing(lines, len(groups), sent, count) * _ROUNDED if lines else 0.0), count

    def _least_passing(self, lines: Alike, stages: int, sent: float, count: int) -> float:
        """Return what no pipeline is below: each micro-batch takes as long as the longest stage, or passes in a turn.

        `lines` are the seconds of stages by their blocks, `sent` those of all that is handed over.
        """
        blocks = self._costs.num_blocks
        least = least_passing(blocks, lines, count - 1) + sent
        if not sent or not self.takes_turns or stages >= count:
            return least
        passed = sum(number * line.fixed for line, number in lines) + blocks * min(line.slope for line, _ in lines)
        return max(least, (passed + sent) * (1 + (count - 1) / stages))

    def _block_lines(self, groups: Groups) -> list[tuple[Line, Line]]:
        """Return what stages take besides blocks, and for each block; nothing where blocks differ."""
        count = self._costs.num_blocks
        if not self._costs.is_uniform or count <= _FEWEST:
            return []
        lines = [self.stage(group, 1, 2).seconds for group in groups]
        besides = [Line()] * len(groups)
        for place, start in ((0, 0), (-1, count - 1)):
            with_end = self.stage(groups[place], start, start + 1).seconds
            end = Line(with_end.fixed - lines[place].fixed, with_end.slope - lines[place].slope)
            besides[place] = besides[place] + end
        return list(zip(besides, lines, strict=True))

    def blocks(self, groups: Groups, num_replicas: int, rows: tuple[int, int], timed_rows: int) -> Blocks | None:
        """Return the blocks that let stages end together, timed for so many rows; None when no cut fits memory.

        `rows` are those of a micro-batch, and how many of these.
        """
        runs = [StageRun.of(stage, len(groups), rows, num_replicas, self._rules) for stage in range(len(groups))]
        free = self._free_blocks(groups, timed_rows)
        if free is not None and self._keep_all(groups, free, runs):
            return free
        pairs = zip(groups, runs, strict=True)
        known = [self._seconds.setdefault((self.kinds.of(group), run, timed_rows), {}) for group, run in pairs]

        def seconds(index: int, start: int, stop: int) -> float:
            if (start, stop) not in known[index]:
                stage = self.stage(groups[index], start, stop)
                known[index][start, stop] = stage.seconds_of(runs[index], self._rules, timed_rows)
            return known[index][start, stop]

        return self.balanced(groups, seconds)

    def _free_blocks(self, groups: Groups, rows: int) -> Blocks | None:
        """Return the blocks that let stages end together if memory is left out; None where blocks differ."""
        count = self._costs.num_blocks
        if not self._costs.is_uniform or not len(groups) < count:
            return None
        pairs = [((1, 2), (1, 3))] * len(groups)  # of one block and of two
        pairs[0], pairs[-1] = ((0, 1), (0, 2)), ((count - 1, count), (count - 2, count))
        if len(groups) == 1:
            return (count,)
        times = [[self.stage(group, *n).seconds(rows) for n in pair] for group, pair in zip(groups, pairs, strict=True)]
        lines = [Line(first - (second - first), second - first) for first, second in times]
        return deal(count, len(groups), lambda index, start, stop: lines[index](stop - start))

    def _keep_all(self, groups: Groups, blocks: Blocks, runs: Sequence[StageRun]) -> bool:
        """Tell whether stages of so many blocks fit memory with nothing recomputed."""
        stops = itertools.accumulate(blocks)
        found = (self.stage(group, stop - n, stop) for group, n, stop in zip(groups, blocks, stops, strict=True))
        pairs = zip(found, runs, strict=True)
        return all(stage.most_rows(run, self._rules.zero) >= run.micro_rows for stage, run in pairs)

    def balanced(self, groups: Groups, seconds: RangeSeconds) -> Blocks | None:
        """Return the blocks that let stages end together; None when none take finite seconds."""
        ways = deal if self._costs.is_uniform or len(groups) == 1 else min_max_ranges
        return ways(self._costs.num_blocks, len(groups), seconds)

    def stage(self, devices: tuple[int, ...], start: int, stop: int) -> StageEstimate:
        """Return what a group takes for the blocks [start, stop)."""
        start, stop = self._like(start, stop)
        key = (self.kinds.of(devices), start, stop)
        if key not in self._stages:
            stage, around = self._stage_of(devices), self._around(devices)
            self._stages[key] = stage_estimate(stage, start, stop, self._costs, around, self._rules.memory)
        return self._stages[key]

    def _stage_of(self, devices: tuple[int, ...]) -> Stage:
        return self._shape([self._cluster.device(rank) for rank in devices])

    def _sharing(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """Return the places in a group of those that hold the same of all weights as its first device."""
        kind = self.kinds.of(devices)
        if kind not in self._rings:
            self._rings[kind] = tuple(map(devices.index, self._stage_of(devices).context_groups[0]))
        return self._rings[kind]

    def replica(self, groups: Groups, blocks: Blocks) -> Replica:
        """Return a pipeline like that of these groups; one like it that was asked for before has other devices."""
        key = (self.kinds.key(groups), blocks)
        if key not in self._replicas:
            self._replicas[key] = self._new_replica(groups, blocks)
        return self._replicas[key]

    def _like(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range that costs the same, where all blocks are alike."""
        if start == 0 or stop == self._costs.num_blocks or not self._costs.is_uniform:
            return start, stop
        return 1, 1 + stop - start

    def _around(self, devices: Sequence[int]) -> Cluster:
        """Return a cluster of the devices and the fastest of their kinds, by which overheads are counted."""
        own = [self._cluster.device(rank) for rank in devices]
        fastest = {self._fastest[device.kind].rank: self._fastest[device.kind] for device in own}
        members = {device.rank: device for device in own} | fastest
        return replace(self._cluster, devices=tuple(members.values()))

    def _new_replica(self, groups: Groups, blocks: Blocks) -> Replica:
        stops, pairs = list(itertools.accumulate(blocks)), list(zip(groups, blocks, strict=True))
        stages = tuple(self.stage(group, stop - count, stop) for (group, count), stop in zip(pairs, stops, strict=True))
        work, edges = (stage.seconds for stage in stages), self.hand_overs.edges(groups, stops[:-1])
        return Replica(
            pipeline=Pipeline(tuple(replace(self._stage_of(group), blocks=count) for group, count in pairs)),
            stages=stages,
            passing=Passing.of(work, edges, self._rules.schedule),
        )


@once
def even_estimates(problem: Problem) -> Estimates:
    """Return the estimates of a problem's plans whose groups have equal shards, which all searches share."""
    return Estimates(problem.costs, problem.cluster, replica_rules(problem, problem.options.zero))


class HandOvers:
    """The hand-overs of a program between groups of a cluster."""

    def __init__(self, costs: ProgramCosts, cluster: Cluster, kinds: GroupKinds) -> None:
        self._costs, self._cluster, self._kinds = costs, cluster, kinds
        self._lines: dict[Hashable, Line] = {}

    def edges(self, groups: Groups, stops: Sequence[int]) -> list[Line]:
        """Return what each stage but the last hands over to the next one; they end at these blocks."""
        return [self._hand_over(*pair, stop) for pair, stop in zip(itertools.pairwise(groups), stops, strict=True)]

    def _hand_over(self, group: tuple[int, ...], other: tuple[int, ...], block: int) -> Line:
        size = self._costs.boundary(block)
        key = (self._kinds.of((*group, *other)), len(group), size)
        if key not in self._lines:
            stages = Stage(group), Stage(other)
            self._lines[key] = hand_over_line(*stages, size, self._cluster)
        return self._lines[key]

    def among(self, pipelines: Sequence[Groups], replica: Replica) -> tuple[Replica, float]:
        """Return a replica as it is among equal pipelines, and `crossing_seconds` of these.

        Hand-overs of the same stages share links (`crowds`). Besides, a message finds the busiest link taken by others
        for the share of the time that these keep it busy, and waits for half of one, as much as is left on average.
        """
        crossing = self.crossing_seconds(pipelines, replica)
        if not crossing:
            return replica, 0.0
        crowds, own = self.crowds(pipelines), self._own_seconds(replica)
        beat = replica.with_crowds(crowds).passing.beat(1)
        shares = (max(0.0, crossing - count * seconds) / beat for count, seconds in zip(crowds, own, strict=True))
        waits = [1 + min(1.0, share) / 2 for share in shares]
        return replica.with_crowds([wait * count for wait, count in zip(waits, crowds, strict=True)]), crossing

    def crossing_seconds(self, pipelines: Sequence[Groups], replica: Replica) -> float:
        """Return for how long a row of each pipeline keeps the busiest link of a node busy with hand-overs."""
        own = self._own_seconds(replica)
        sent: dict[int, float] = {}
        for groups in pipelines:
            nodes = [self._kinds.node[group[0]] for group in groups]
            for (here, there), seconds in zip(itertools.pairwise(nodes), own, strict=True):
                for node in (here, there) if here != there else ():
                    sent[node] = sent.get(node, 0.0) + seconds
        return max(sent.values(), default=0.0)

    def _own_seconds(self, replica: Replica) -> list[float]:
        """Return for how long a row that stages hand over keeps a link between nodes busy, at each edge."""
        stops = itertools.accumulate(replica.blocks[:-1])
        return [self._costs.boundary(stop) / self._cluster.inter.bytes_per_second for stop in stops]

    def crowds(self, pipelines: Sequence[Groups]) -> tuple[int, ...]:
        """Return how many pipelines share the link of a node at each edge between stages, at the most."""
        nodes = [[self._kinds.node[group[0]] for group in groups] for groups in pipelines]
        edges = zip(*map(itertools.pairwise, nodes), strict=True)
        crossing = ([pair for pair in edge if pair[0] != pair[1]] for edge in edges)
        counts = (
            [count for ends in zip(*pairs, strict=True) for count in Counter(ends).values()] for pairs in crossing
        )
        return tuple([max([1, *found]) for found in counts])
