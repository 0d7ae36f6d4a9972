"""Equal pipelines over a region: the ways to run one of them, and what a step takes besides."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.estimates import Estimates
from hetu_fx.planner.search.replica import Family
from hetu_fx.planner.search.step_ends import NO_END, EndEstimate
from hetu_fx.plans.plan import Pipeline


@dataclass(frozen=True, slots=True)
class Template:
    """Equal pipelines over a region, the ways to run one of them, and what a step takes besides.

    `shared_bytes` are those that one turn of all parameters sends through the link of a node if there are others too;
    hand-overs of a row of each pipeline keep such a link busy for `crossing_seconds`. `known` are the seconds of steps,
    as far as they have been asked for.
    """

    pipelines: tuple[Groups, ...]
    family: Family
    end: EndEstimate = NO_END
    shared_bytes: float = 0.0
    crossing_seconds: float = 0.0
    known: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, pipelines: tuple[Groups, ...], family: Family, estimates: Estimates, zero: int, *, is_alone: bool = True
    ) -> Template:
        """Return the template with what a step of it takes besides: alone, or beside others at the least."""
        replica = family.replica
        alone, beside = (estimates.ends.shared_bytes(pipelines, replica, are_all=are_all) for are_all in (True, False))
        crossing = estimates.hand_overs.crossing_seconds(pipelines, replica)
        made = cls(pipelines, family, shared_bytes=beside, crossing_seconds=crossing)
        end = estimates.ends.of([replica], *made.ends, zero, alone if is_alone else beside)
        return replace(made, family=family.hiding(end.gradients, zero), end=end, known={})

    def kind(self, estimates: Estimates) -> Hashable:
        """Return what templates have in common whose pipelines take the same, and are as many."""
        blocks = tuple([stage.blocks for stage in self.family.replica.pipeline.stages])
        return (
            estimates.kinds.key(self.pipelines[0]),
            blocks,
            len(self.pipelines),
            self.shared_bytes,
            self.crossing_seconds,
        )

    @property
    def ends(self) -> tuple[list[tuple[int, ...]], int]:
        """Return the first stage of each pipeline, and the last device of the first one."""
        return [groups[0] for groups in self.pipelines], self.pipelines[0][-1][-1]

    def seconds(self, rows: int) -> float:
        """Return the seconds of so many rows over all pipelines."""
        own = math.ceil(rows / len(self.pipelines))
        if not self.crossing_seconds:
            return self.family.seconds(own)
        return max(self.family.seconds(own), own * self.crossing_seconds + self.family.latency(own))

    def step_seconds(self, rows: int) -> float:
        """Return the seconds of a step of so many rows over all pipelines, with what it takes besides."""
        if rows not in self.known:
            self.known[rows] = self.seconds(rows) + self.end.seconds(self.hidden(self.end.gradients, rows))
        return self.known[rows]

    def hidden(self, gradients: float, rows: int) -> float:
        """Return for how long such gradients travel beside the last backward of a pipeline, the least of all."""
        return self.family.hidden(gradients, max(1, rows // len(self.pipelines)))

    def made(self, rows: int) -> Iterator[Pipeline]:
        """Yield the pipelines with their rows."""
        count = len(self.pipelines)
        for index, groups in enumerate(self.pipelines):
            share = rows // count + (index < rows % count)
            yield self.family.on(groups).pipeline(share)
