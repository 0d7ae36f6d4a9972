"""Makes replicas of groups of devices, of which no two need be alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.placement import stops_of
from hetu_fx.planner.price.stage import stage_costs
from hetu_fx.planner.search.allocate import RangeSeconds, cut, deal, spread
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.replica import Replica, ReplicaRules, StageEstimate, StageRun, stage_estimate
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Stage

Blocks = tuple[int, ...]


class Builder:
    """Makes replicas of groups of devices, deciding ratios and blocks; remembers what it worked out."""

    def __init__(self, costs: ProgramCosts, cluster: Cluster, rules: ReplicaRules, micro_rows: int) -> None:
        """Blocks are balanced for micro-batches of `micro_rows` rows."""
        self._costs, self._cluster, self._rules, self._rows = costs, cluster, rules, micro_rows
        self._estimates: dict[tuple[tuple[int, ...], int, int], StageEstimate] = {}
        self._ratios: dict[tuple[int, ...], tuple[int, ...] | None] = {}
        self._replicas: dict[object, tuple[Replica, ...]] = {}
        self._kinds = {device.rank: (replace(device, rank=0), rules.memory[device.rank]) for device in cluster.devices}
        self._speed = math.fsum(device.speed for device in cluster.devices)

    def build(self, groups: Groups) -> tuple[Replica, ...]:
        """Return the replicas of these stages: one, or one for each cut of the blocks that memory asks for.

        None where they cannot be: too few units or blocks, or no memory.
        """
        alike = tuple(tuple(self._kinds[rank] for rank in devices) for devices in groups)
        if alike not in self._replicas:
            stages = [self._stage(devices) for devices in groups]
            whole = [stage for stage in stages if stage is not None]
            cuts = dict.fromkeys(self._cuts(groups)) if len(whole) == len(stages) else {}
            self._replicas[alike] = tuple(self._new_replica(whole, blocks) for blocks in cuts)
        return tuple(found.on(groups) for found in self._replicas[alike])

    def _new_replica(self, stages: list[Stage], blocks: Blocks) -> Replica:
        pairs = zip(stages, blocks, strict=True)
        pipeline = Pipeline(tuple(replace(stage, blocks=count) for stage, count in pairs))
        priced = stage_costs(pipeline, self._costs, self._cluster)
        stops = stops_of(pipeline, self._costs.num_blocks)
        made = [self._estimate(stage.devices, stops[i], stops[i + 1]) for i, stage in enumerate(pipeline.stages)]
        return Replica(
            pipeline=pipeline,
            lines=tuple(stage.seconds for stage in priced),
            holdings=tuple(replace(held, stage=i) for i, one in enumerate(made) for held in one.holdings),
            update=reduce(Line.upper, (one.update for one in made)),
            recompute_lines=tuple(one.recompute_line for one in made),
        )

    def _stage(self, devices: tuple[int, ...]) -> Stage | None:
        """Return the stage whose shards finish together: units to speeds by exact min-max, 1 at least."""
        if devices not in self._ratios:
            speeds = [self._cluster.device(rank).speed for rank in devices]
            seconds = [lambda units, speed=speed: units / speed for speed in speeds]
            units = self._costs.units if len(devices) > 1 else 1
            self._ratios[devices] = spread(units, seconds, low=(1,) * len(devices))
        ratios = self._ratios[devices]
        return None if ratios is None else Stage(devices, ratios)

    def _cuts(self, groups: Groups) -> Iterator[Blocks]:
        """Yield the blocks of stages that end together, within memory, for each number of micro-batches.

        Memory is that for the rows that the devices' share of the cluster's speed stands for; where these do not fit,
        for micro-batches of one row. What is in flight depends on where a stage stands.
        """
        free = self._balanced(groups, lambda index, start, stop: self._seconds(groups[index], start, stop))
        if free is None:
            return
        rows = self._rows_of(groups)
        for count in dict.fromkeys(min(count, rows) for count in self._rules.micro_batches):
            for micro_rows in dict.fromkeys((math.ceil(rows / count), 1)):
                blocks = self._fitting(groups, (micro_rows, count), free)
                if blocks is not None:
                    yield blocks
                    break

    def _rows_of(self, groups: Groups) -> int:
        speed = math.fsum(self._cluster.device(rank).speed for devices in groups for rank in devices)
        return max(1, round(self._costs.rows * speed / self._speed))

    def _fitting(self, groups: Groups, rows: tuple[int, int], free: Blocks) -> Blocks | None:
        """Return blocks that fit memory for (rows of a micro-batch, micro-batches); `free` ones if these do."""
        copies = max(1, len(self._cluster.devices) // sum(map(len, groups)))
        runs = [StageRun.of(stage, len(groups), rows, copies, self._rules) for stage in range(len(groups))]

        def seconds(index: int, start: int, stop: int) -> float:
            return self._estimate(groups[index], start, stop).seconds_of(runs[index], self._rules, self._rows)

        stops = [sum(free[:i]) for i in range(len(free) + 1)]
        fits = all(
            holding.most_rows(runs[index], self._rules.zero) >= rows[0]
            for index, devices in enumerate(groups)
            for holding in self._estimate(devices, stops[index], stops[index + 1]).holdings
        )
        return free if fits else self._balanced(groups, seconds)

    def _balanced(self, groups: Groups, seconds: RangeSeconds) -> Blocks | None:
        ways = deal if self._costs.is_uniform or len(groups) == 1 else cut
        return ways(self._costs.num_blocks, len(groups), seconds)

    def _seconds(self, devices: tuple[int, ...], start: int, stop: int) -> float:
        return self._estimate(devices, start, stop).seconds(self._rows)

    def _estimate(self, devices: tuple[int, ...], start: int, stop: int) -> StageEstimate:
        """Return what the blocks [start, stop) take on a group, without what is handed over."""
        key = (devices, start, stop)
        if key not in self._estimates:
            stage = self._stage(devices)
            assert stage is not None, "build() refuses groups without ratios first"
            memory = self._rules.memory
            self._estimates[key] = stage_estimate(stage, start, stop, self._costs, self._cluster, memory)
        return self._estimates[key]
