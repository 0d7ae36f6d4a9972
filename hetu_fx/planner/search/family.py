"""The ways to run a replica: in how many micro-batches, and what is recomputed for it to fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hetu_fx.planner.search.replica import Replica
from hetu_fx.planner.search.stage_estimates import ReplicaRules
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Pipeline


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
