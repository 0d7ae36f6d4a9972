"""One replica of a plan: its pipeline, with blocks and ratios decided, and what it costs.

What a group of devices takes for a range of blocks, whether its devices are alike or not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.placement import BlockRange
from hetu_fx.planner.price.stage import (
    FORWARD_AND_BACKWARD,
    device_lines,
    forward_lines,
    pipeline_seconds,
    round_lines,
    rounds_of,
)
from hetu_fx.planner.price.step import least_blocks
from hetu_fx.planner.price.step_end import optimizer_seconds
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.values.device_memory import in_flight
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Schedule, Stage


@dataclass(frozen=True, slots=True)
class ReplicaRules:
    """What holds for all replicas of a search; `memory` is usable bytes by rank."""

    schedule: Schedule
    zero: int
    micro_batches: tuple[int, ...]
    memory: dict[int, int]
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class StageRun:
    """How a stage is run: what is in flight, and over how many replicas states are spread."""

    micro_rows: int
    num_in_flight: int
    micro_batches: int
    num_replicas: int

    @classmethod
    def of(cls, stage: int, num_stages: int, rows: tuple[int, int], num_replicas: int, rules: ReplicaRules) -> StageRun:
        """Return how a stage of a pipeline is run; `rows` are those of a micro-batch, and how many of these."""
        micro_rows, count = rows
        return cls(micro_rows, in_flight(rules.schedule, stage, num_stages, count), count, num_replicas)


@dataclass(frozen=True, slots=True)
class DeviceHolding:
    """What a device of a stage holds, and the memory that it may use.

    Attributes:
        stage: number of the stage in its pipeline.
        memory: usable bytes.
        piece: what it holds, as the stage's devices share work.
        costs: of the program, however a stage's devices share work.
        shape: a stage like its own, whose devices share work in the same way.
        position: its place among them.
    """

    stage: int
    memory: int
    piece: BlockRange
    costs: ProgramCosts
    shape: Stage
    position: int

    @classmethod
    def of(cls, shape: Stage, position: int, memory: int, costs: ProgramCosts, start: int, stop: int) -> DeviceHolding:
        """Return what a device holds of a stage with the blocks [start, stop)."""
        share, group = shape.work_shares[position], len(shape.context_groups)
        piece = BlockRange(costs.on(shape, position), start, stop, share, group)
        return cls(0, memory, piece, costs, shape, position)

    def recomputing(self, blocks: int) -> DeviceHolding:
        """Return the same with so many blocks, its first ones, recomputed."""
        kept = self.costs.kept_by(self.shape.recomputing(blocks), self.piece.start, self.position)
        return replace(self, piece=replace(self.piece, costs=kept))

    def most_rows(self, run: StageRun, zero: int, recompute: int = 0) -> int:
        """Return the most rows of a micro-batch that fit, whatever rows `run` says."""
        piece = self.recomputing(recompute).piece if recompute else self.piece
        copies = run.num_replicas * self.shape.context
        return piece.most_rows(self.memory, run.num_in_flight, run.micro_batches, zero, copies)

    def least_recompute(self, run: StageRun, rules: ReplicaRules) -> int | None:
        """Return how few blocks have to be recomputed for the run to fit; None if it does not whatever is."""
        if self.most_rows(run, rules.zero) >= run.micro_rows:
            return 0
        if not rules.recompute:
            return None

        def fits(blocks: int) -> bool:
            return self.most_rows(run, rules.zero, blocks) >= run.micro_rows

        piece, known = self.piece, self.piece.costs.known_recompute
        key, fewer = (self._asked(run, rules, *blocks) for blocks in ((piece.start, piece.stop), self._fewer))
        if key not in known:
            least = known.get(fewer, 0)
            known[key] = None if least is None else least_blocks(piece.stop - piece.start, fits, least)
        return known[key]

    def _asked(self, run: StageRun, rules: ReplicaRules, start: int, stop: int) -> Hashable:
        """Return what the answer for these blocks is kept by."""
        return run, rules.zero, self.memory, start, stop, self.piece.share, self.piece.group, self.shape.context

    @property
    def _fewer(self) -> tuple[int, int]:
        """Return the blocks but for one, which need no more recomputed: searches give stages one after the other."""
        start, stop = self.piece.start, self.piece.stop
        return (start, stop - 1) if not start or stop < self.piece.costs.num_blocks else (start + 1, stop)


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """A group with a range of blocks: seconds of a micro-batch without hand-overs, and what its devices hold.

    `recompute_line` is one more forward of all its blocks; `holdings` are those of devices that differ, as of stage 0;
    `update_seconds` is what the slowest device's optimizer step takes if it owns all that it holds; `host_seconds` is
    what a step takes on the slowest host.
    """

    seconds: Line
    recompute_line: Line
    holdings: tuple[DeviceHolding, ...]
    update_seconds: float
    host_seconds: float

    def keeps_all(self, run: StageRun, rules: ReplicaRules) -> bool:
        """Tell whether a run fits memory with nothing recomputed."""
        return all(holding.most_rows(run, rules.zero) >= run.micro_rows for holding in self.holdings)

    def seconds_of(self, run: StageRun, rules: ReplicaRules, rows: int) -> float:
        """Return the seconds of `rows` rows with what has to be recomputed for a run; infinite where it cannot fit."""
        needs = [holding.least_recompute(run, rules) for holding in self.holdings]
        counts = [count for count in needs if count is not None]
        if len(counts) < len(needs):
            return math.inf
        piece = self.holdings[0].piece
        return self.seconds(rows) + _share_of_line(self.recompute_line, max(counts), piece.stop - piece.start)(rows)


def _share_of_line(line: Line, recompute: int, blocks: int) -> Line:
    """Return the seconds of recomputing some blocks, `line` being all of them; as if all took the same."""
    share = recompute / blocks if recompute else 0.0
    return Line(line.fixed * share, line.slope * share)


@dataclass(frozen=True, slots=True)
class Replica:
    """A pipeline (rows and micro-batches still 1), the seconds of its stages and what its devices hold.

    `update_seconds` is what the slowest device's optimizer step takes if it owns all that it holds; `host_seconds` is
    what a step takes on the slowest host; `recompute_lines` is one more forward of all blocks of each stage, and
    `stage_bytes` are the most bytes of parameters of a device of each stage.
    """

    pipeline: Pipeline
    lines: tuple[Line, ...]
    holdings: tuple[DeviceHolding, ...]
    update_seconds: float
    host_seconds: float = 0.0
    recompute_lines: tuple[Line, ...] = ()
    stage_bytes: tuple[float, ...] = ()

    @property
    def parameter_bytes(self) -> float:
        """Return the most parameter bytes that one of its devices holds."""
        return max(holding.piece.parameter_bytes for holding in self.holdings)

    def seconds(self, rows: int, micro_batches: int, recompute: Sequence[int] = ()) -> float:
        """Return the seconds that the pipeline takes for so many rows, some blocks of each stage being recomputed."""
        return self.host_seconds + pipeline_seconds(self._lines(recompute), rows, micro_batches)

    def hidden(self, gradients: float, rows: int, micro_batches: int) -> float:
        """Return for how long gradients that travel for so long do so beside the last backward.

        Those of the last stage leave first: when a stage has come to its end, its own and those of earlier ones are
        left, and each takes its share of the time that the most do.
        """
        micro_rows, sizes = rows // max(1, min(micro_batches, rows)), self.stage_bytes
        least, passed, most, largest = math.inf, 0.0, 0.0, max(sizes)
        for line, size in zip(self.lines, sizes, strict=True):
            passed, most = passed + (1 - 1 / FORWARD_AND_BACKWARD) * line(micro_rows), max(most, size)
            least = min(least, passed + gradients * (1 - most / largest if largest else 0.0))
            if most == largest:
                break
        return least

    def latency(self, rows: int, micro_batches: int) -> float:
        """Return the seconds of one micro-batch through all stages."""
        micro_rows = math.ceil(rows / max(1, min(micro_batches, rows)))
        return math.fsum(line(micro_rows) for line in self.lines)

    def _lines(self, recompute: Sequence[int]) -> Sequence[Line]:
        if not any(recompute):
            return self.lines
        parts = zip(self.lines, self.recompute_lines, recompute, self.pipeline.stages, strict=True)
        return [line + _share_of_line(whole, count, stage.blocks or 0) for line, whole, count, stage in parts]

    def most_micro_rows(self, micro_batches: int, num_replicas: int, rules: ReplicaRules) -> int:
        """Return the most rows of a micro-batch that fit the memory of every device; 0 when none do."""
        runs = self._runs(1, micro_batches, num_replicas, rules)
        return min(holding.most_rows(runs[holding.stage], rules.zero) for holding in self.holdings)

    def least_recompute(
        self, micro_rows: int, micro_batches: int, num_replicas: int, rules: ReplicaRules
    ) -> tuple[int, ...] | None:
        """Return how few blocks each stage has to recompute for so many rows of a micro-batch; None if none do."""
        counts = [0] * len(self.lines)
        runs = self._runs(micro_rows, micro_batches, num_replicas, rules)
        for holding in self.holdings:
            least = holding.least_recompute(runs[holding.stage], rules)
            if least is None:
                return None
            counts[holding.stage] = max(counts[holding.stage], least)
        return tuple(counts)

    def _runs(self, micro_rows: int, micro_batches: int, num_replicas: int, rules: ReplicaRules) -> list[StageRun]:
        count, rows = len(self.lines), (micro_rows, micro_batches)
        return [StageRun.of(stage, count, rows, num_replicas, rules) for stage in range(count)]

    def recomputing(self, counts: Sequence[int]) -> Replica:
        """Return the replica with so many blocks of each stage recomputed."""
        if not any(counts):
            return self
        pairs = zip(self.pipeline.stages, counts, strict=True)
        stages = tuple(stage.recomputing(count) for stage, count in pairs)
        held = tuple(holding.recomputing(counts[holding.stage]) for holding in self.holdings)
        pipeline = replace(self.pipeline, stages=stages)
        return replace(self, pipeline=pipeline, lines=tuple(self._lines(counts)), holdings=held)

    def on(self, groups: Groups) -> Replica:
        """Return the same replica on other devices, which must be alike."""
        pairs = zip(self.pipeline.stages, groups, strict=True)
        stages = tuple(replace(stage, devices=devices) for stage, devices in pairs)
        return replace(self, pipeline=replace(self.pipeline, stages=stages))


@dataclass(frozen=True, slots=True)
class ReplicaRun:
    """A way to run a replica: in so many micro-batches, some blocks of each stage being recomputed."""

    seconds: float
    micro_batches: int
    recompute: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """A replica, of so many, and the ways to run it.

    `gradients` are the seconds in which they travel home, as far as possible beside the last backward: fewer
    micro-batches hide more of them. `known` are the fastest ways by rows, and `most` are the most rows of a micro-batch
    that fit memory without recompute by how many of these there are, as far as they have been asked for.
    """

    replica: Replica
    num_replicas: int
    rules: ReplicaRules
    gradients: float = 0.0
    known: dict[int, ReplicaRun | None] = field(default_factory=dict, compare=False, repr=False)
    most: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def hiding(self, gradients: float, zero: int) -> Family:
        """Return the same with gradients that travel for so long, and states as given."""
        if zero == self.rules.zero:
            return replace(self, gradients=gradients, known={}) if gradients else self
        return Family(self.replica, self.num_replicas, replace(self.rules, zero=zero), gradients)

    @property
    def limits(self) -> tuple[tuple[int, int], ...]:
        """Return (micro-batches, most rows of one that fit memory without recompute), also where these are none."""
        found = ((count, self.most_rows(count)) for count in self.rules.micro_batches)
        return tuple((count, most) for count, most in found if most >= 1 or self.rules.recompute)

    def most_rows(self, micro_batches: int) -> int:
        """Return the most rows of a micro-batch that fit memory without recompute; 0 when none do."""
        if micro_batches not in self.most:
            self.most[micro_batches] = self.replica.most_micro_rows(micro_batches, self.num_replicas, self.rules)
        return self.most[micro_batches]

    def ways(self, rows: int) -> list[ReplicaRun]:
        """Return the ways to do `rows` rows, with the least recompute that fits for each number of micro-batches."""
        found = (self._way(rows, count) for count in self.rules.micro_batches)
        return [way for way in found if way is not None]

    def _way(self, rows: int, micro_batches: int) -> ReplicaRun | None:
        micro_rows = math.ceil(rows / max(1, min(micro_batches, rows)))
        if micro_rows <= self.most_rows(micro_batches):
            return ReplicaRun(self.replica.seconds(rows, micro_batches), micro_batches)
        if not self.rules.recompute:
            return None
        counts = self.replica.least_recompute(micro_rows, micro_batches, self.num_replicas, self.rules)
        if counts is None:
            return None
        return ReplicaRun(self.replica.seconds(rows, micro_batches, counts), micro_batches, counts)

    def best(self, rows: int) -> ReplicaRun | None:
        """Return the fastest way to do `rows` rows and to bring gradients home; None if none fits."""
        if rows not in self.known:
            self.known[rows] = self._new_best(rows)
        return self.known[rows]

    def _new_best(self, rows: int) -> ReplicaRun | None:
        """Ask for what has to be recomputed only where the way may be the fastest with nothing recomputed."""
        best, least = None, math.inf
        counts = {min(count, rows): count for count in reversed(self.rules.micro_batches)}.values()
        for bound, count in sorted((self.replica.seconds(rows, n) + self._shown(rows, n), n) for n in counts):
            if bound > least:
                break
            way = self._way(rows, count)
            if way is not None and (seconds := way.seconds + self._shown(rows, count)) < least:
                best, least = way, seconds
        return best

    def bounds(self, rows: int) -> Iterator[tuple[float, int]]:
        """Yield seconds that no way to do `rows` rows is below, for each number of micro-batches."""
        for count in sorted({min(count, rows) for count in self.rules.micro_batches}):
            yield self.replica.seconds(rows, count), count

    def _shown(self, rows: int, micro_batches: int) -> float:
        """Return for how long gradients travel after the last backward."""
        return (
            max(0.0, self.gradients - self.replica.hidden(self.gradients, rows, micro_batches))
            if self.gradients
            else 0.0
        )

    def seconds(self, rows: int) -> float:
        """Return the seconds of the fastest way to do `rows` rows; infinite if none fits."""
        best = self.best(rows)
        return math.inf if best is None else best.seconds

    def hidden(self, gradients: float, rows: int) -> float:
        """Return for how long such gradients travel beside the end of the fastest way to do `rows` rows."""
        best = self.best(rows)
        return 0.0 if best is None else self.replica.hidden(gradients, rows, best.micro_batches)

    def latency(self, rows: int) -> float:
        """Return the seconds of one micro-batch of the fastest way to do `rows` rows; infinite if none fits."""
        best = self.best(rows)
        return math.inf if best is None else self.replica.latency(rows, best.micro_batches)

    def pipeline(self, rows: int) -> Pipeline:
        """Return the pipeline with its rows, in no more micro-batches than rows."""
        best = self.best(rows) or ReplicaRun(math.inf, 1)
        made = self.replica.recomputing(best.recompute)
        return replace(made.pipeline, share=rows, micro_batches=min(best.micro_batches, rows))

    def on(self, groups: Groups) -> Family:
        """Return the same on other devices, which must be alike."""
        return replace(self, replica=self.replica.on(groups))


def stage_estimate(
    stage: Stage, start: int, stop: int, costs: ProgramCosts, cluster: Cluster, memory: Mapping[int, int]
) -> StageEstimate:
    """Return what the blocks [start, stop) take on a stage, without what is handed over.

    Of devices with equal shares, that with the least memory stands for all.

    Args:
        stage: its devices, and how these share work; other fields are left out of account.
        start: first block.
        stop: after the last block.
        costs: of the program.
        cluster: has the stage's devices, and the fastest of their kinds, by which overheads are counted.
        memory: usable bytes by rank.
    """
    bare, shares = replace(stage, blocks=None).recomputing(stop - start), stage.shares
    firsts = {share: shares.index(share) for share in dict.fromkeys(shares)}
    parts_of = {share: costs.on(stage, position).stage(start, stop) for share, position in firsts.items()}
    again_of = {share: costs.again(bare, start, position) for share, position in firsts.items()}
    parts, again = ([found[share] for share in shares] for found in (parts_of, again_of))
    group = costs.of_groups(stage)
    rounds = rounds_of(stage, group.stage(start, stop), parts, group.repeated_parts)
    sums, returns = round_lines(tuple(rounds), cluster)
    room = {
        share: min(memory[r] for r, other in zip(stage.devices, shares, strict=True) if other == share)
        for share in firsts
    }
    return StageEstimate(
        seconds=reduce(Line.upper, device_lines(stage, parts, cluster)) + (sums + returns),
        recompute_line=reduce(Line.upper, forward_lines(device_lines(stage, again, cluster))),
        holdings=tuple(
            DeviceHolding.of(stage, position, room[share], costs, start, stop) for share, position in firsts.items()
        ),
        update_seconds=max(
            optimizer_seconds(part.parameter_bytes_at(share), cluster.device(rank))
            for rank, share, part in zip(stage.devices, stage.work_shares, parts, strict=True)
        ),
        host_seconds=max(cluster.device(rank).step_now for rank in stage.devices),
    )
