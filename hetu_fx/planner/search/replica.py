"""One replica of a plan: its pipeline, with blocks and ratios decided, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetu_fx.planner.price.stage import FORWARD_AND_BACKWARD, pipeline_seconds
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.stage_estimates import DeviceHolding, ReplicaRules, StageRun, share_of_line
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Pipeline


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
        return [line + share_of_line(whole, count, stage.blocks or 0) for line, whole, count, stage in parts]

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
