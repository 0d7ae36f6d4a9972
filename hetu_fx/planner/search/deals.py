"""Deals: so many pipelines with as many groups of each class, and what no template of one is below."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetu_fx.planner.price.stage import FORWARD_AND_BACKWARD
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.estimates import Estimates
from hetu_fx.planner.search.replica import Family
from hetu_fx.planner.search.template import Template

Region = tuple[int, ...]
"""Numbers of classes, slowest first."""


@dataclass(frozen=True, slots=True)
class DeviceAllotment:
    """So many pipelines with as many groups of each class: of neighbours, or of groups that stand far apart."""

    groups: Sequence[Sequence[tuple[int, ...]]]
    count: int
    is_apart: bool = False

    def pipeline(self, index: int) -> Groups:
        """Return the groups of a pipeline."""
        return tuple(itertools.chain.from_iterable(self._of(found, index) for found in self.groups))

    def rows(self, total: int) -> int:
        """Return the most rows of a pipeline, of so many in all."""
        return math.ceil(total / self.count)

    def bounds(self, estimates: Estimates, rows: int) -> DealBounds:
        """Return bounds that no template is below."""
        pipelines = tuple(map(self.pipeline, range(self.count)))
        turns = estimates.ends.least_turns(pipelines)
        return DealBounds(
            estimates.bounds(pipelines[0], self.rows(rows)), len(pipelines[0]), estimates.takes_turns, *turns
        )

    def template(self, family: Family, estimates: Estimates, zero: int, *, is_alone: bool = True) -> Template:
        """Return the template of all pipelines, run in one of these ways."""
        return Template.of(tuple(map(self.pipeline, range(self.count))), family, estimates, zero, is_alone=is_alone)

    def _of(self, found: Sequence[tuple[int, ...]], index: int) -> Sequence[tuple[int, ...]]:
        each = len(found) // self.count
        return (
            found[index : each * self.count : self.count] if self.is_apart else found[index * each : (index + 1) * each]
        )


@dataclass(frozen=True, slots=True)
class DealBounds:
    """What no template of a deal is below.

    Attributes:
        pipeline: the seconds of its pipelines for each number of micro-batches.
        stages: how many a pipeline has.
        takes_turns: no more micro-batches than stages are under way (1F1B).
        alone, beside: those of a turn of all parameters, by itself and with other pipelines.
    """

    pipeline: tuple[tuple[float, int], ...]
    stages: int
    takes_turns: bool
    alone: float
    beside: float

    def most_hidden(self, seconds: float, count: int) -> float:
        """Return how long the last backward takes at most, of pipelines of so many seconds and micro-batches.

        It is its share of what a micro-batch takes in all stages: of the seconds, or of as many as there are turns.
        """
        turns = (self.stages + count - 1) / self.stages
        return (1 - 1 / FORWARD_AND_BACKWARD) * seconds / (turns if self.takes_turns and turns >= 2 else 1.0)


@dataclass(frozen=True, slots=True)
class TemplateRegion:
    """What templates are for: a region, with states as given, alone or beside others."""

    region: Region
    zero: int
    is_alone: bool = True

    def least_seconds(self, bounds: DealBounds) -> float:
        """Return what a step takes at least.

        Gradients travel beside the last backward.
        """
        turn = bounds.alone if self.is_alone else bounds.beside
        hidden = [(seconds, bounds.most_hidden(seconds, count)) for seconds, count in bounds.pipeline]
        if self.zero:
            return min(seconds + turn + max(0.0, turn - most) for seconds, most in hidden)
        return min(seconds + max(0.0, 2 * turn - most) for seconds, most in hidden)


@dataclass(frozen=True, slots=True)
class Draft:
    """A deal with its bounds, and how its pipelines run if that is known."""

    deal: DeviceAllotment
    bounds: DealBounds
    family: Family | None = None

    def worked_out(self, estimates: Estimates, rows: int, place: TemplateRegion) -> Queued | None:
        """Return it with blocks dealt to stages, or, where they are, its template; None where no blocks fit."""
        if self.family is None:
            own = self.deal.rows(rows)
            family = estimates.family(self.deal.pipeline(0), self.deal.count, own)
            if family is None:
                return None
            known = replace(self.bounds, pipeline=tuple(family.bounds(own)))
            return place.least_seconds(known), replace(self, family=family)
        made = self.deal.template(self.family, estimates, place.zero, is_alone=place.is_alone)
        seconds = made.step_seconds(rows)
        return (seconds, made) if seconds < math.inf else None


Queued = tuple[float, Draft | Template]
"""A template with its seconds, or a draft with seconds that its template is not below."""


def deals_of(groups: Sequence[Sequence[tuple[int, ...]]], count: int) -> Iterator[DeviceAllotment]:
    """Yield the ways to make so many pipelines with as many groups of each class."""
    each = [len(found) // count for found in groups]
    if all(each):
        yield DeviceAllotment(groups, count)
        if count > 1 and max(each) > 1:
            yield DeviceAllotment(groups, count, is_apart=True)
