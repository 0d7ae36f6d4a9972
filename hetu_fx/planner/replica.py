"""One replica of a plan: its pipeline, with blocks and ratios decided, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetu_fx.planner.allocate import cut, spread
from hetu_fx.planner.cost import (
    Line,
    StageCosts,
    compute_lines,
    optimizer_seconds,
    pipeline_seconds,
    stage_costs,
    tensor_parallel_lines,
)
from hetu_fx.planner.memory import in_flight
from hetu_fx.planner.program import ProgramCosts
from hetu_fx.planner.shards import Piece, stops_of
from hetu_fx.planner.space import Groups
from hetu_fx.plans import Pipeline, Schedule, Stage
from hetu_fx.topology import Cluster


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for all replicas of a search; `memory` is usable bytes by rank."""

    schedule: Schedule
    zero: int
    micro_batches: tuple[int, ...]
    memory: dict[int, int]


@dataclass(frozen=True, slots=True)
class Holding:
    """What a device of a stage holds, and the memory that it may use."""

    stage: int
    memory: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Replica:
    """A pipeline (rows and micro-batches still 1), the seconds of its stages and what its devices hold.

    `update_seconds` is the slowest device's optimizer step if it owned all that it holds.
    """

    pipeline: Pipeline
    lines: tuple[Line, ...]
    holdings: tuple[Holding, ...]
    update_seconds: float

    @property
    def parameter_bytes(self) -> float:
        """Return the most parameter bytes that one of its devices holds."""
        return max(holding.piece.parameter_bytes for holding in self.holdings)

    def seconds(self, rows: int, micro_batches: int) -> float:
        """Return the seconds that the pipeline takes for so many rows."""
        return pipeline_seconds(self.lines, rows, micro_batches)

    def most_micro_rows(self, micro_batches: int, num_replicas: int, rules: Rules) -> int:
        """Return the most rows of a micro-batch that fit the memory of every device; 0 when none do."""
        return min(_most_rows(h, len(self.lines), micro_batches, num_replicas, rules) for h in self.holdings)

    def on(self, groups: Groups) -> Replica:
        """Return the same replica on other devices, which must be alike."""
        pairs = zip(self.pipeline.stages, groups, strict=True)
        stages = tuple(replace(stage, devices=devices) for stage, devices in pairs)
        return replace(self, pipeline=replace(self.pipeline, stages=stages))


@dataclass(frozen=True, slots=True)
class Family:
    """A replica and the ways to run it: (micro-batches, most rows of one that fit memory)."""

    replica: Replica
    limits: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, replica: Replica, num_replicas: int, rules: Rules) -> Family:
        """Return the ways in which a replica fits memory when there are so many."""
        limits = ((m, replica.most_micro_rows(m, num_replicas, rules)) for m in rules.micro_batches)
        return cls(replica, tuple((m, most) for m, most in limits if most >= 1))

    def best(self, rows: int) -> tuple[float, int]:
        """Return (seconds, micro-batches) of the fastest way to do `rows` rows; infinite if none fits."""
        fitting = (m for m, most in self.limits if math.ceil(rows / max(1, min(m, rows))) <= most)
        return min(((self.replica.seconds(rows, m), m) for m in fitting), default=(math.inf, 1))

    def seconds(self, rows: int) -> float:
        """Return the seconds of the fastest way to do `rows` rows; infinite if none fits."""
        return self.best(rows)[0]

    def pipeline(self, rows: int) -> Pipeline:
        """Return the pipeline with its rows, in no more micro-batches than rows."""
        return replace(self.replica.pipeline, rows=rows, micro_batches=min(self.best(rows)[1], rows))


def _most_rows(holding: Holding, num_stages: int, micro_batches: int, num_replicas: int, rules: Rules) -> int:
    kept = in_flight(rules.schedule, holding.stage, num_stages, micro_batches)
    return holding.piece.most_rows(holding.memory, kept, micro_batches, rules.zero, num_replicas)


class Builder:
    """Makes replicas of groups of devices, deciding ratios and blocks; remembers what it worked out."""

    def __init__(self, costs: ProgramCosts, cluster: Cluster, rules: Rules, micro_rows: int) -> None:
        """Blocks are balanced for micro-batches of `micro_rows` rows."""
        self._costs, self._cluster, self._rules, self._rows = costs, cluster, rules, micro_rows
        self._seconds: dict[tuple[tuple[int, ...], int, int], float] = {}
        self._ratios: dict[tuple[int, ...], tuple[int, ...] | None] = {}
        self._replicas: dict[object, Replica | None] = {}
        self._kinds = {d.rank: (d.kind, d.node, d.speed, d.meeting_now, rules.memory[d.rank]) for d in cluster.devices}

    def build(self, groups: Groups) -> Replica | None:
        """Return the replica of these stages, None when it cannot be (too few units or blocks, no memory)."""
        alike = tuple(tuple(self._kinds[rank] for rank in devices) for devices in groups)
        if alike not in self._replicas:
            self._replicas[alike] = self._new_replica(groups)
        found = self._replicas[alike]
        return None if found is None else found.on(groups)

    def _new_replica(self, groups: Groups) -> Replica | None:
        stages = [self._stage(devices) for devices in groups]
        whole = [stage for stage in stages if stage is not None]
        blocks = self._blocks(groups) if len(whole) == len(stages) else None
        if blocks is None:
            return None
        pairs = zip(whole, blocks, strict=True)
        pipeline = Pipeline(tuple(replace(stage, blocks=count) for stage, count in pairs))
        priced = stage_costs(pipeline, self._costs, self._cluster)
        holdings = [h for index in range(len(priced)) for h in self._holdings(index, pipeline)]
        updates = (self._update_seconds(stage) for stage in priced)
        return Replica(pipeline, tuple(s.seconds for s in priced), tuple(holdings), max(updates))

    def _holdings(self, index: int, pipeline: Pipeline) -> list[Holding]:
        stage, stops = pipeline.stages[index], stops_of(pipeline, self._costs.num_blocks)
        pieces = self._pieces(stage, stops[index], stops[index + 1])
        memory = [self._rules.memory[rank] for rank in stage.devices]
        return [Holding(index, limit, piece) for limit, piece in zip(memory, pieces, strict=True)]

    def _pieces(self, stage: Stage, start: int, stop: int) -> list[Piece]:
        shares = [ratio / sum(stage.ratios) for ratio in stage.ratios]
        return [Piece(self._costs, start, stop, share, len(shares)) for share in shares]

    def _update_seconds(self, stage: StageCosts) -> float:
        held = [stage.parts.parameter_bytes_at(stage.share(i)) for i in range(len(stage.stage.devices))]
        devices = [self._cluster.device(rank) for rank in stage.stage.devices]
        return max(optimizer_seconds(n, device) for n, device in zip(held, devices, strict=True))

    def _stage(self, devices: tuple[int, ...]) -> Stage | None:
        """Return the stage whose shards finish together: units to speeds by exact min-max, 1 at least."""
        if devices not in self._ratios:
            speeds = [self._cluster.device(rank).speed for rank in devices]
            seconds = [lambda units, speed=speed: units / speed for speed in speeds]
            units = self._costs.units if len(devices) > 1 else 1
            self._ratios[devices] = spread(units, seconds, low=(1,) * len(devices))
        ratios = self._ratios[devices]
        return None if ratios is None else Stage(devices, ratios)

    def _blocks(self, groups: Groups) -> tuple[int, ...] | None:
        count, stages = self._costs.num_blocks, len(groups)
        if stages == 1:
            return (count,) if self._range_seconds(groups[0], 0, count) < math.inf else None
        if self._costs.is_uniform and count >= stages:
            return self._even_blocks(groups)
        return cut(count, stages, lambda i, start, stop: self._range_seconds(groups[i], start, stop))

    def _even_blocks(self, groups: Groups) -> tuple[int, ...] | None:
        """Spread blocks that are all alike: which of them a stage holds does not matter, only how many."""
        count, last = self._costs.num_blocks, len(groups) - 1

        def seconds(index: int, blocks: int) -> float:
            start = 0 if index == 0 else (count - blocks if index == last else 1)
            return self._range_seconds(groups[index], start, start + blocks)

        costs = [lambda blocks, index=index: seconds(index, blocks) for index in range(len(groups))]
        found = spread(count, costs, low=(1,) * len(groups), high=(count - last,) * len(groups))
        fits = found is not None and all(seconds(i, n) < math.inf for i, n in enumerate(found))
        return found if fits else None

    def _range_seconds(self, devices: tuple[int, ...], start: int, stop: int) -> float:
        """Return the seconds of a micro-batch for the blocks [start, stop), infinite when they do not fit."""
        key = (devices, start, stop)
        if key not in self._seconds:
            self._seconds[key] = self._new_range_seconds(devices, start, stop)
        return self._seconds[key]

    def _new_range_seconds(self, devices: tuple[int, ...], start: int, stop: int) -> float:
        stage = self._stage(devices)
        assert stage is not None, "build() refuses groups without ratios first"
        if not self._fits(stage, start, stop):
            return math.inf
        parts = self._costs.stage(start, stop)
        slowest = max(line(self._rows) for line in compute_lines(stage, parts, self._cluster))
        sums, returns = tensor_parallel_lines(stage, parts, self._cluster)
        return slowest + sums(self._rows) + returns(self._rows)

    def _fits(self, stage: Stage, start: int, stop: int) -> bool:
        """Tell whether one row fits, states spread thinnest; a finished plan is checked exactly."""
        thinnest = len(self._cluster.devices)
        for rank, piece in zip(stage.devices, self._pieces(stage, start, stop), strict=True):
            if piece.most_rows(self._rules.memory[rank], 1, 1, self._rules.zero, thinnest) < 1:
                return False
        return True
