"""One replica of a plan: its pipeline, with blocks and ratios decided, and what it costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.passing import Passing, backwards, charged, times, uppermost
from hetu_fx.planner.search.stage_estimates import DeviceHolding, ReplicaRules, StageRun, share_of_line
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Pipeline, Schedule

_passing = lru_cache(maxsize=4096)(Passing.of)  # replicas on other devices ask for the same


@dataclass(frozen=True, slots=True)
class Replica:
    """A pipeline (rows and micro-batches still 1), the seconds of its stages and what its devices hold.

    Attributes:
        pipeline: with blocks and ratios.
        work: seconds of stages by the rows of a micro-batch, without what they hand over.
        edges: those of a hand-over from each stage to the next one; one back takes as long.
        holdings: what devices hold.
        update_seconds: what the slowest device's optimizer step takes if it owns all that it holds.
        schedule: of the plan.
        host_seconds: what a step takes on the slowest host.
        recompute_lines: one more forward of all blocks of each stage.
        stage_bytes: the most bytes of parameters of a device of each stage.
        passing, backwards: of these stages.
    """

    pipeline: Pipeline
    work: tuple[Line, ...]
    edges: tuple[Line, ...]
    holdings: tuple[DeviceHolding, ...]
    update_seconds: float
    schedule: Schedule
    host_seconds: float = 0.0
    recompute_lines: tuple[Line, ...] = ()
    stage_bytes: tuple[float, ...] = ()
    passing: Passing = field(init=False)
    backwards: tuple[Line, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "passing", _passing(self.work, self.edges, self.schedule))
        object.__setattr__(self, "backwards", backwards(self.work, self.edges))

    @property
    def lines(self) -> tuple[Line, ...]:
        """Return the seconds of stages if what they hand over counts with their work."""
        return charged(self.work, self.edges)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return how many blocks each stage has."""
        return tuple([stage.blocks or 0 for stage in self.pipeline.stages])

    @property
    def parameter_bytes(self) -> float:
        """Return the most parameter bytes that one of its devices holds."""
        return max(holding.piece.parameter_bytes for holding in self.holdings)

    def crowded(self, crowds: Sequence[float]) -> Replica:
        """Return the replica beside others, so many of which, itself included, share links at each of its edges."""
        if all(count == 1 for count in crowds):
            return self
        pairs = zip(self.edges, crowds, strict=True)
        return replace(self, edges=tuple(Line(edge.fixed, count * edge.slope) for edge, count in pairs))

    def seconds(self, rows: int, micro_batches: int, recompute: Sequence[int] = ()) -> float:
        """Return the seconds that the pipeline takes for so many rows, some blocks of each stage being recomputed."""
        passing = self.passing
        if any(recompute):
            passing = Passing.of(self._work(recompute), self.edges, self.schedule)
        return self.host_seconds + passing.seconds(rows, micro_batches)

    def shown(self, gradients: float) -> tuple[Line, ...]:
        """Return for how long gradients travel after the last backward at the most, by the rows of a micro-batch.

        Those of the last stage leave first: when a stage has come to its end, its own and those of earlier ones are
        left, and each takes its share of the time that the most do.
        """
        largest = max(self.stage_bytes) or 1.0
        most = itertools.accumulate(self.stage_bytes, max)
        pairs = zip(most, self.backwards, strict=True)
        return tuple(uppermost([after(gradients * size / largest, passed) for size, passed in pairs]))

    def left(self, block: int) -> Line:
        """Return how long before its end a pipeline's last backward comes to a block, all behind it being done.

        By the rows of a micro-batch.
        """
        start, before = 0, Line()
        for count, passed in zip(self.blocks, self.backwards, strict=True):
            if block <= start + count:
                part = (block - start) / count if count else 1.0
                return times(1 - part, before) + times(part, passed)
            start, before = start + count, passed
        return before

    def latency(self, rows: int, micro_batches: int) -> float:
        """Return the seconds of one micro-batch through all stages."""
        return self.passing.whole(math.ceil(rows / max(1, min(micro_batches, rows))))

    def _work(self, recompute: Sequence[int]) -> list[Line]:
        parts = zip(self.work, self.recompute_lines, recompute, self.pipeline.stages, strict=True)
        return [line + share_of_line(whole, count, stage.blocks or 0) for line, whole, count, stage in parts]

    def most_micro_rows(self, micro_batches: int, num_replicas: int, rules: ReplicaRules) -> int:
        """Return the most rows of a micro-batch that fit the memory of every device; 0 when none do."""
        runs = self._runs(1, micro_batches, num_replicas, rules)
        return min(holding.most_rows(runs[holding.stage], rules.zero) for holding in self.holdings)

    def least_recompute(
        self, micro_rows: int, micro_batches: int, num_replicas: int, rules: ReplicaRules
    ) -> tuple[int, ...] | None:
        """Return how few blocks each stage has to recompute for so many rows of a micro-batch; None if none do."""
        counts = [0] * len(self.work)
        runs = self._runs(micro_rows, micro_batches, num_replicas, rules)
        for holding in self.holdings:
            least = holding.least_recompute(runs[holding.stage], rules)
            if least is None:
                return None
            counts[holding.stage] = max(counts[holding.stage], least)
        return tuple(counts)

    def _runs(self, micro_rows: int, micro_batches: int, num_replicas: int, rules: ReplicaRules) -> list[StageRun]:
        count, rows = len(self.work), (micro_rows, micro_batches)
        return [StageRun.of(stage, count, rows, num_replicas, rules) for stage in range(count)]

    def recomputing(self, counts: Sequence[int]) -> Replica:
        """Return the replica with so many blocks of each stage recomputed."""
        if not any(counts):
            return self
        pairs = zip(self.pipeline.stages, counts, strict=True)
        stages = tuple(stage.recomputing(count) for stage, count in pairs)
        held = tuple(holding.recomputing(counts[holding.stage]) for holding in self.holdings)
        pipeline = replace(self.pipeline, stages=stages)
        return replace(self, pipeline=pipeline, work=tuple(self._work(counts)), holdings=held)

    def on(self, groups: Groups) -> Replica:
        """Return the same replica on other devices, which must be alike."""
        return replace(self, pipeline=placed(self.pipeline, groups))


def placed(pipeline: Pipeline, groups: Groups) -> Pipeline:
    """Return a pipeline on other devices."""
    pairs = zip(pipeline.stages, groups, strict=True)
    return replace(pipeline, stages=tuple([replace(stage, devices=devices) for stage, devices in pairs]))


def micro_rows(rows: int, micro_batches: int) -> int:
    """Return the rows of the smallest of up to so many micro-batches."""
    return rows // max(1, min(micro_batches, rows))


def after(seconds: float, passed: Line) -> Line:
    """Return what is left of so many seconds when others have passed."""
    return Line(seconds - passed.fixed, -passed.slope)


@dataclass(frozen=True, slots=True)
class ReplicaRun:
    """A way to run a replica: in so many micro-batches, some blocks of each stage being recomputed."""

    seconds: float
    micro_batches: int
    recompute: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """A replica, of so many, and the ways to run it.

    `shown` is for how long gradients travel after the last backward, by the rows of a micro-batch: fewer micro-batches
    hide more of them. `known` are the fastest ways by rows, and `most` are the most rows of a micro-batch
    that fit memory without recompute by how many of these there are, as far as they have been asked for.
    """

    replica: Replica
    num_replicas: int
    rules: ReplicaRules
    shown: tuple[Line, ...] = ()
    known: dict[int, ReplicaRun | None] = field(default_factory=dict, compare=False, repr=False)
    most: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def of(self, replica: Replica) -> Family:
        """Return the same of a replica that holds as much."""
        return self if replica is self.replica else replace(self, replica=replica, known={})

    def hiding(self, gradients: float, zero: int) -> Family:
        """Return the same with gradients that travel for so long, and states as given."""
        shown = self.replica.shown(gradients) if gradients else ()
        if zero == self.rules.zero:
            return replace(self, shown=shown, known={}) if gradients else self
        return Family(self.replica, self.num_replicas, replace(self.rules, zero=zero), shown)

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
        return max([0.0, *(line(micro_rows(rows, micro_batches)) for line in self.shown)])

    def seconds(self, rows: int) -> float:
        """Return the seconds of the fastest way to do `rows` rows; infinite if none fits."""
        best = self.best(rows)
        return math.inf if best is None else best.seconds

    def micro_rows(self, rows: int) -> int:
        """Return the rows of the smallest micro-batch of the fastest way to do `rows` rows."""
        best = self.best(rows)
        return rows if best is None else micro_rows(rows, best.micro_batches)

    def latency(self, rows: int) -> float:
        """Return the seconds of one micro-batch of the fastest way to do `rows` rows; infinite if none fits."""
        best = self.best(rows)
        return math.inf if best is None else self.replica.latency(rows, best.micro_batches)

    def pipeline(self, rows: int) -> Pipeline:
        """Return the pipeline with its rows, in no more micro-batches than rows."""
        best = self.best(rows) or ReplicaRun(math.inf, 1)
        made = self.replica.recomputing(best.recompute)
        return replace(made.pipeline, share=rows, micro_batches=min(best.micro_batches, rows))
