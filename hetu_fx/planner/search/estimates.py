"""Pipelines priced by what their devices are, not by which: for searches over thousands of devices.

Devices that are alike (`search.alike`) are a class. What a stage takes depends on the classes of its devices and on
which of them share a node, so that equal stages are priced once, by the functions of the cost model, in a cluster of
their own devices. Numbers are those of `predict` but for which device of a stage stands for it in gradient syncs; what
a search chooses by them is priced by `predict` at its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import reduce

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.stage import hand_over_line
from hetu_fx.planner.price.step_end import sync_seconds
from hetu_fx.planner.search.device_classes import alike_in
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.replica import Replica, ReplicaRules, StageEstimate, stage_estimate
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Pipeline, Stage


def rules_of(problem: Problem, zero: int) -> ReplicaRules:
    """Return what holds for the replicas of a problem's plans."""
    options = problem.options
    memory = {
        device.rank: int(alike.memory_bytes * options.memory_fraction)
        for alike in alike_in(problem.cluster)
        for device in alike.devices
    }
    return ReplicaRules(options.schedule, zero, options.micro_batches, memory, options.recompute)


class Estimates:
    """What stages and pipelines of even shards take; each is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._costs, self._cluster = problem.costs, problem.cluster
        devices = problem.cluster.devices
        self._memory = rules_of(problem, problem.options.zero).memory
        classes = enumerate(alike_in(problem.cluster))
        self._class = {device.rank: number for number, alike in classes for device in alike.devices}
        self._node = {device.rank: problem.cluster.node_of(device.rank) for device in devices}
        by_speed = sorted(devices, key=lambda device: (device.speed, -device.rank))
        self._fastest = {device.kind: device for device in by_speed}
        self._stages: dict[Hashable, StageEstimate] = {}
        self._replicas: dict[Hashable, Replica] = {}
        self._hand_overs: dict[Hashable, Line] = {}

    def stage(self, devices: tuple[int, ...], start: int, stop: int) -> StageEstimate:
        """Return what a group takes for the blocks [start, stop)."""
        start, stop = self._like(start, stop)
        key = (self._kind(devices), start, stop)
        if key not in self._stages:
            around = self._around(devices)
            self._stages[key] = stage_estimate(Stage(devices), start, stop, self._costs, around, self._memory)
        return self._stages[key]

    def replica(self, groups: Groups, blocks: tuple[int, ...]) -> Replica:
        """Return a pipeline like that of these groups; one like it that was asked for before has other devices."""
        key = (self.key(groups), blocks)
        if key not in self._replicas:
            self._replicas[key] = self._new_replica(groups, blocks)
        return self._replicas[key]

    def key(self, groups: Groups) -> Hashable:
        """Return what pipelines have in common that take the same: what groups are, and which hand over to a node."""
        nodes = [self._node[group[0]] for group in groups]
        return tuple(map(self._kind, groups)), tuple([a != b for a, b in itertools.pairwise(nodes)])

    def ends(self, replicas: Iterable[Replica], firsts: Sequence[int], last: int, zero: int) -> float:
        """Return seconds of gradient sync, gather and update, for pipelines whose first devices are given.

        `last` is the last device of the first pipeline, which may stand on another node than all first ones.
        """
        found = list(replicas)
        parameters = max(replica.parameter_bytes for replica in found)
        update = reduce(Line.upper, (replica.update for replica in found))
        rings = (firsts, (last, *firsts[1:]))
        sync = max(sum(sync_seconds(parameters, ring, self._cluster, zero)) for ring in rings)
        sync += self._costs.row_sums.seconds(firsts, self._cluster)
        return sync + update(1 / len(firsts) if zero else 1.0)

    def _kind(self, devices: Sequence[int]) -> Hashable:
        """Return what a group is: the classes of its devices, and which share a node."""
        nodes: dict[int, int] = {}
        places = [nodes.setdefault(self._node[rank], len(nodes)) for rank in devices]
        classes = tuple([self._class[rank] for rank in devices])
        return (classes, tuple(places)) if len(nodes) > 1 else classes

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
        return Cluster(tuple(members.values()), self._cluster.intra, self._cluster.inter)

    def _new_replica(self, groups: Groups, blocks: tuple[int, ...]) -> Replica:
        stops = [sum(blocks[: i + 1]) for i in range(len(blocks))]
        pairs = zip(groups, blocks, stops, strict=True)
        stages = [self.stage(devices, stop - count, stop) for devices, count, stop in pairs]
        edges = [self._hand_over(groups[i], groups[i + 1], stops[i]) for i in range(len(groups) - 1)]
        lines = [stage.seconds for stage in stages]
        for i, edge in enumerate(edges):
            lines[i], lines[i + 1] = lines[i] + edge, lines[i + 1] + edge
        held = [replace(holding, stage=i) for i, stage in enumerate(stages) for holding in stage.holdings]
        pipeline = Pipeline(tuple(Stage(g, blocks=n) for g, n in zip(groups, blocks, strict=True)))
        update = reduce(Line.upper, (stage.update for stage in stages))
        recompute_line = tuple(stage.recompute_line for stage in stages)
        return Replica(pipeline, tuple(lines), tuple(held), update, recompute_line)

    def _hand_over(self, group: Sequence[int], other: Sequence[int], block: int) -> Line:
        size = self._costs.boundary(block)
        key = (self._node[group[0]] == self._node[other[0]], size)
        if key not in self._hand_overs:
            ends = Stage((group[0],)), Stage((other[0],))
            self._hand_overs[key] = hand_over_line(*ends, size, self._cluster)
        return self._hand_overs[key]
