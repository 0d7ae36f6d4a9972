"""One replica of a plan: its pipeline, with blocks and ratios decided, and how long micro-batches take through it.

With w_s seconds of a micro-batch in stage s of S, and h_s to hand it over to the next one, and as much back, one takes

    L = sum_s w_s + 2 sum_s h_s                                                                          (1)

Under 1F1B up to S - s micro-batches are under way behind the start of stage s, and each comes back there after

    R_s = sum_(t >= s) w_t + 2 sum_(t >= s) h_t                                                          (2)

so that m micro-batches take about

    L + (m - 1) max(max_s w_s, max_s (w_s + w_s+1 + 2 h_s) / 2, max_s R_s / (S - s) where S - s < m)     (3)

as two stages that follow each other wait for each other too: one more micro-batch is under way in front. Schedules that
are played (`price.pipeline`) were seen to differ from (3) by up to 6 %.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetu_fx.planner.price.stage_seconds import FORWARD_AND_BACKWARD
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.stage_estimates import ReplicaRules, StageEstimate, StageRun
from hetu_fx.planner.values.line import Line, uppermost
from hetu_fx.plans.plan import Pipeline, Schedule

_BACKWARD = 1 - 1 / FORWARD_AND_BACKWARD


@dataclass(frozen=True, slots=True)
class Passing:
    """Micro-batches through stages, as lines over the rows of one.

    Attributes:
        work: seconds of stages, without what they hand over.
        edges: those of a hand-over from each stage to the next one; one back takes as long.
        schedule: of the plan.
        whole: (1).
        beats: seconds of each further micro-batch at least, each with the number of micro-batches above which that is
            so; those that are nowhere above another are left out.
        backwards: from when on a pipeline is in the last backward of each stage, and of those before it, until it ends.
    """

    work: tuple[Line, ...]
    edges: tuple[Line, ...]
    schedule: Schedule
    whole: Line
    beats: tuple[tuple[int, Line], ...]
    backwards: tuple[Line, ...]

    @classmethod
    def of(cls, work: Iterable[Line], edges: Iterable[Line], schedule: Schedule) -> Passing:
        """Return it for the work of stages and what they hand over, one way."""
        work, edges = tuple(work), tuple(edges)
        turns = list(_turns(work, edges))
        lines = [(0, line) for line in uppermost(work)]
        for asked in (_pairs(work, edges), turns[:-1]) if schedule == "1f1b" else ():
            found = [(number, turn.times(1 / number)) for number, turn in asked]
            lines += [one for one in found if not _is_below(one[1], lines)]
        back = (own.times(_BACKWARD) + sent for own, sent in zip(work, [Line(), *edges], strict=True))
        return cls(work, edges, schedule, turns[0][1], tuple(lines), tuple(itertools.accumulate(back)))

    def seconds(self, rows: int, micro_batches: int) -> float:
        """Return (3) of `rows` rows in up to `micro_batches` micro-batches, no more than there are rows."""
        if rows == 0:
            return 0.0
        count = min(micro_batches, rows)
        each = math.ceil(rows / count)
        return self.whole(each) + (count - 1) * self.beat(each, count)

    def beat(self, rows: int, micro_batches: float = math.inf) -> float:
        """Return how long each micro-batch of so many rows takes after the first, of so many of them."""
        return max([line(rows) for least, line in self.beats if least < micro_batches], default=0.0)

    @property
    def charged(self) -> tuple[Line, ...]:
        """Return what stages take if what they hand over, to the next one and back, counts with their work."""
        around = zip(self.work, [*self.edges, Line()], [Line(), *self.edges], strict=True)
        return tuple([own + there + back for own, there, back in around])


def _turns(work: Sequence[Line], edges: Sequence[Line]) -> Iterator[tuple[int, Line]]:
    """Yield S - s and (2) of each stage, from the first to the last."""
    sent = [line.times(2.0) for line in (*edges, Line())][::-1]
    back = itertools.accumulate(one + other for one, other in zip(work[::-1], sent, strict=True))
    yield from reversed(list(enumerate(back, 1)))


def _pairs(work: Sequence[Line], edges: Sequence[Line]) -> list[tuple[int, Line]]:
    """Return what two stages that follow each other, and what they hand over, take together."""
    pairs = zip(itertools.pairwise(work), edges, strict=True)
    return [(2, line) for line in uppermost([one + other + sent.times(2.0) for (one, other), sent in pairs])]


def _is_below(line: Line, others: Sequence[tuple[int, Line]]) -> bool:
    return any(line.fixed <= other.fixed and line.slope <= other.slope for _, other in others)


@dataclass(frozen=True, slots=True)
class Replica:
    """A pipeline (rows and micro-batches still 1, blocks and ratios decided), its stages, and how these are passed."""

    pipeline: Pipeline
    stages: tuple[StageEstimate, ...]
    passing: Passing

    @property
    def lines(self) -> tuple[Line, ...]:
        """Return the seconds of stages if what they hand over counts with their work."""
        return self.passing.charged

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return how many blocks each stage has."""
        return tuple([stage.blocks or 0 for stage in self.pipeline.stages])

    @property
    def parameter_bytes(self) -> float:
        """Return the most parameter bytes that one of its devices holds."""
        return max(stage.parameter_bytes for stage in self.stages)

    @property
    def update_seconds(self) -> float:
        """Return what the slowest device's optimizer step takes if it owns all that it holds."""
        return max(stage.update_seconds for stage in self.stages)

    @property
    def host_seconds(self) -> float:
        """Return what a step takes on the slowest host."""
        return max(stage.host_seconds for stage in self.stages)

    def with_crowds(self, crowds: Sequence[float]) -> Replica:
        """Return the replica beside others, so many of which, itself included, share links at each of its edges."""
        if all(count == 1 for count in crowds):
            return self
        passing, pairs = self.passing, zip(self.passing.edges, crowds, strict=True)
        edges = (Line(edge.fixed, count * edge.slope) for edge, count in pairs)
        return replace(self, passing=Passing.of(passing.work, edges, passing.schedule))

    def seconds(self, rows: int, micro_batches: int, recompute: Sequence[int] = ()) -> float:
        """Return the seconds that the pipeline takes for so many rows, some blocks of each stage being recomputed."""
        return self.host_seconds + self._passing(recompute).seconds(rows, micro_batches)

    def shown(self, gradients: float) -> tuple[Line, ...]:
        """Return for how long gradients travel after the last backward at the most, by the rows of a micro-batch.

        Those of the last stage leave first: when a stage has come to its end, its own and those of earlier ones are
        left, and each takes its share of the time that the most do.
        """
        largest, sizes = self.parameter_bytes or 1.0, (stage.parameter_bytes for stage in self.stages)
        pairs = zip(itertools.accumulate(sizes, max), self.passing.backwards, strict=True)
        return uppermost(remaining_after(gradients * size / largest, passed) for size, passed in pairs)

    def left(self, block: int) -> Line:
        """Return how long before its end a pipeline's last backward comes to a block, all behind it being done.

        By the rows of a micro-batch.
        """
        start, before = 0, Line()
        for count, passed in zip(self.blocks, self.passing.backwards, strict=True):
            if block <= start + count:
                part = (block - start) / count if count else 1.0
                return before.times(1 - part) + passed.times(part)
            start, before = start + count, passed
        return before

    def latency(self, rows: int, micro_batches: int) -> float:
        """Return the seconds of one micro-batch through all stages."""
        return self.passing.whole(math.ceil(rows / max(1, min(micro_batches, rows))))

    def _passing(self, recompute: Sequence[int]) -> Passing:
        """Return how stages are passed that recompute so many blocks."""
        if not any(recompute):
            return self.passing
        pairs = zip(self.passing.work, self.stages, recompute, strict=True)
        work = (line + stage.recomputed_line(count) for line, stage, count in pairs)
        return Passing.of(work, self.passing.edges, self.passing.schedule)

    def most_micro_rows(self, micro_batches: int, num_replicas: int, rules: ReplicaRules) -> int:
        """Return the most rows of a micro-batch that fit the memory of every device; 0 when none do."""
        return min(stage.most_rows(run, rules.zero) for stage, run in self._runs(1, micro_batches, num_replicas, rules))

    def least_recompute(
        self, micro_rows: int, micro_batches: int, num_replicas: int, rules: ReplicaRules
    ) -> tuple[int, ...] | None:
        """Return how few blocks each stage has to recompute for so many rows of a micro-batch; None if none do."""
        counts = []
        for stage, run in self._runs(micro_rows, micro_batches, num_replicas, rules):
            least = stage.least_recompute(run, rules)
            if least is None:
                return None
            counts.append(least)
        return tuple(counts)

    def _runs(
        self, micro_rows: int, micro_batches: int, num_replicas: int, rules: ReplicaRules
    ) -> Iterator[tuple[StageEstimate, StageRun]]:
        """Yield each stage with how it is run."""
        count, rows = len(self.stages), (micro_rows, micro_batches)
        runs = (StageRun.of(number, count, rows, num_replicas, rules) for number in range(count))
        return zip(self.stages, runs, strict=True)

    def recomputing(self, counts: Sequence[int]) -> Replica:
        """Return the replica with so many blocks of each stage recomputed."""
        if not any(counts):
            return self
        placed = (stage.recomputing(count) for stage, count in zip(self.pipeline.stages, counts, strict=True))
        held = (stage.recomputing(count) for stage, count in zip(self.stages, counts, strict=True))
        return Replica(replace(self.pipeline, stages=tuple(placed)), tuple(held), self._passing(counts))

    def on(self, groups: Groups) -> Replica:
        """Return the same replica on other devices, which must be alike."""
        return replace(self, pipeline=place_pipeline(self.pipeline, groups))


def place_pipeline(pipeline: Pipeline, groups: Groups) -> Pipeline:
    """Return a pipeline on other devices."""
    pairs = zip(pipeline.stages, groups, strict=True)
    return replace(pipeline, stages=tuple([replace(stage, devices=devices) for stage, devices in pairs]))


def remaining_after(seconds: float, passed: Line) -> Line:
    """Return what is left of so many seconds when others have passed."""
    return Line(seconds - passed.fixed, -passed.slope)


def micro_rows(rows: int, micro_batches: int) -> int:
    """Return the rows of the smallest of up to so many micro-batches."""
    return rows // max(1, min(micro_batches, rows))


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
