"""Equal pipelines over a region: the ways to run one of them, and what a step takes besides."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.estimates import Estimates
from hetu_fx.planner.search.replica import Family, placed
from hetu_fx.planner.search.step_ends import NO_END, EndEstimate, Held
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Pipeline


@dataclass(frozen=True, slots=True)
class Template:
    """Equal pipelines over a region, the ways to run one of them, and what a step takes besides.

    `held` tells which nodes hold its stages, `late` for how long gradients travel after it, by the rows of a
    micro-batch; hand-overs of a row of each pipeline keep the link of a node busy for
    `crossing_seconds`. `known` are the seconds of steps, as far as they have been asked for.
    """

    pipelines: tuple[Groups, ...]
    family: Family
    end: EndEstimate = NO_END
    held: Held = ()
    late: tuple[Line, ...] = ()
    crossing_seconds: float = 0.0
    known: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, pipelines: tuple[Groups, ...], family: Family, estimates: Estimates, zero: int, *, is_alone: bool = True
    ) -> Template:
        """Return the template with what a step of it takes besides: alone, or beside others at the least."""
        replica, crossing = estimates.hand_overs.among(pipelines, family.replica)
        family, held = family.of(replica), estimates.ends.held(pipelines, replica)
        made = cls(pipelines, family, held=held, crossing_seconds=crossing)
        links = estimates.ends.links([held], zero, others=0 if is_alone else 1)
        end = estimates.ends.of([replica], *made.ends, zero, links)
        return replace(made, family=family.hiding(end.gradients, zero), end=end, late=end.late(replica), known={})

    def kind(self, estimates: Estimates) -> Hashable:
        """Return what templates have in common whose pipelines take the same, and are as many."""
        replica = self.family.replica
        alike = estimates.kinds.key(self.pipelines[0]), replica.blocks, len(self.pipelines)
        return *alike, replica.edges, self.crossing_seconds, self.end.links

    @property
    def ends(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the first stage of each pipeline, and the last one."""
        return [groups[0] for groups in self.pipelines], [groups[-1] for groups in self.pipelines]

    def seconds(self, rows: int) -> float:
        """Return the seconds of so many rows over all pipelines."""
        own = math.ceil(rows / len(self.pipelines))
        if not self.crossing_seconds:
            return self.family.seconds(own)
        return max(self.family.seconds(own), own * self.crossing_seconds + self.family.latency(own))

    def step_seconds(self, rows: int) -> float:
        """Return the seconds of a step of so many rows over all pipelines, with what it takes besides."""
        if rows not in self.known:
            micro_rows = self.micro_rows(rows)
            late = max([line(micro_rows) for line in self.late], default=0.0)
            self.known[rows] = self.seconds(rows) + self.end.seconds(late)
        return self.known[rows]

    def micro_rows(self, rows: int) -> int:
        """Return the rows of the smallest micro-batch of so many rows over all pipelines."""
        return self.family.micro_rows(math.ceil(rows / len(self.pipelines)))

    def made(self, rows: int) -> Iterator[Pipeline]:
        """Yield the pipelines with their rows."""
        few, more = divmod(rows, len(self.pipelines))
        of_rows = {count: self.family.pipeline(count) for count in (few, few + 1)[: 1 + (more > 0)]}
        for index, groups in enumerate(self.pipelines):
            yield placed(of_rows[few + (index < more)], groups)
