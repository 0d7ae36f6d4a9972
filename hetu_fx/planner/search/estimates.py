"""Pipelines priced by what their devices are, not by which: for searches over thousands of devices.

Devices of one kind, speed and memory are a class. What a stage takes depends on the classes of its devices and on
which of them share a node, so that equal stages are priced once, by the functions of the cost model, in a cluster of
their own devices. Numbers are those of `predict` but for which device of a stage stands for it in gradient syncs; what
a search chooses by them is priced by `predict` at its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import reduce

from hetu_fx.planner.cost import (
    Line,
    compute_lines,
    forward_lines,
    hand_over_line,
    optimizer_seconds,
    sync_seconds,
    tensor_parallel_lines,
)
from hetu_fx.planner.replica import Holding, Replica, Rules, StageEstimate
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.shards import Piece
from hetu_fx.planner.space import Groups
from hetu_fx.plans import Pipeline, Stage
from hetu_fx.topology import Cluster, Device

DeviceClass = tuple[str, float, int, float]
"""Kind, speed, memory, and the most bytes per second that it sends or receives."""


def class_of(device: Device) -> DeviceClass:
    """Return what makes devices alike."""
    return device.kind, device.speed, device.memory_bytes, device.most_bytes_per_second


def rules_of(problem: Problem, zero: int) -> Rules:
    """Return what holds for the replicas of a problem's plans."""
    options, devices = problem.options, problem.cluster.devices
    memory = {device.rank: int(device.memory_bytes * options.memory_fraction) for device in devices}
    return Rules(options.schedule, zero, options.micro_batches, memory, options.recompute)


class Estimates:
    """What stages and pipelines of even shards take; each is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._costs, self._cluster = problem.costs, problem.cluster
        devices = problem.cluster.devices
        self._memory = rules_of(problem, problem.options.zero).memory
        numbers = {known: number for number, known in enumerate(dict.fromkeys(map(class_of, devices)))}
        self._class = {device.rank: numbers[class_of(device)] for device in devices}
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
            self._stages[key] = self._new_stage(devices, start, stop)
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
        update = max(replica.update_seconds for replica in found)
        rings = (firsts, (last, *firsts[1:]))
        sync = max(sum(sync_seconds(parameters, ring, self._cluster, zero)) for ring in rings)
        sync += self._costs.row_sums.seconds(firsts, self._cluster)
        return sync + update / (len(firsts) if zero else 1)

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

    def _new_stage(self, devices: tuple[int, ...], start: int, stop: int) -> StageEstimate:
        stage, parts = Stage(devices), self._costs.stage(start, stop)
        piece = Piece(self._costs, start, stop, 1 / len(devices), len(devices))
        around = self._around(devices)
        seconds = reduce(Line.upper, compute_lines(stage, parts, around))
        again = self._costs.again(replace(stage, recompute=stop - start), start)
        held = piece.parameter_bytes
        return StageEstimate(
            seconds=sum(tensor_parallel_lines(stage, parts, around), seconds),
            again=reduce(Line.upper, forward_lines(compute_lines(stage, again, around))),
            holdings=(Holding(0, min(self._memory[rank] for rank in devices), piece),),
            update_seconds=max(optimizer_seconds(held, around.device(rank)) for rank in devices),
        )

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
        update, again = max(stage.update_seconds for stage in stages), tuple(stage.again for stage in stages)
        return Replica(pipeline, tuple(lines), tuple(held), update, again)

    def _hand_over(self, group: Sequence[int], other: Sequence[int], block: int) -> Line:
        size = self._costs.boundary(block)
        key = (self._node[group[0]] == self._node[other[0]], size)
        if key not in self._hand_overs:
            ends = Stage((group[0],)), Stage((other[0],))
            self._hand_overs[key] = hand_over_line(*ends, size, self._cluster)
        return self._hand_overs[key]
