"""Equal pipelines over a region of classes of devices, and the fastest of these.

A template is so many equal pipelines with the ways to run one of them. A deal says which groups they have, and what no
template of it is below: deals are worked out as far as they can be among the fastest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetu_fx.cluster.cluster import Device
from hetu_fx.planner.price.stage_seconds import FORWARD_AND_BACKWARD
from hetu_fx.planner.search.device_orders import Groups, devices_by_likeness, ranks_by_node
from hetu_fx.planner.search.estimates import Estimates, even_estimates
from hetu_fx.planner.search.homogeneous import stage_counts
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.replica import Family, place_pipeline
from hetu_fx.planner.search.step_ends import NO_END, EndEstimate, Held
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Pipeline

Region = tuple[int, ...]
"""Numbers of classes, slowest first."""

FREE_SIZES = 2
"""In regions of more classes, all groups have one size."""


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
        return *alike, replica.passing.edges, self.crossing_seconds, self.end.links

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
            yield place_pipeline(of_rows[few + (index < more)], groups)


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

    def solve_draft(self, estimates: Estimates, rows: int, place: TemplateRegion) -> Queued | None:
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


def _deals_of(groups: Sequence[Sequence[tuple[int, ...]]], count: int) -> Iterator[DeviceAllotment]:
    """Yield the ways to make so many pipelines with as many groups of each class."""
    each = [len(found) // count for found in groups]
    if all(each):
        yield DeviceAllotment(groups, count)
        if count > 1 and max(each) > 1:
            yield DeviceAllotment(groups, count, is_apart=True)


def device_classes(problem: Problem) -> list[tuple[Device, ...]]:
    """Return the devices of each class, slowest class first."""
    found = sorted(
        devices_by_likeness(problem.cluster), key=lambda alike: (alike.one.speed, alike.one.kind, alike.memory_bytes)
    )
    return [alike.devices for alike in found]


class _Fastest:
    """The templates for a place, those first that are fastest with what ends a step, as far as they are asked for.

    Blocks are dealt, and then the end of a step priced, as long as either can matter.
    """

    def __init__(self, place: TemplateRegion, rows: int, estimates: Estimates, queue: Iterable[Queued]) -> None:
        self._place, self._rows, self._estimates = place, rows, estimates
        self._queue = [(seconds, number, one) for number, (seconds, one) in enumerate(queue)]
        heapq.heapify(self._queue)
        self._found: dict[Hashable, tuple[float, Template]] = {}

    def first(self, count: int, below: float) -> list[Template]:
        """Return so many of them, those that take less than some seconds."""
        while len(self._found) < count and self._queue and self._queue[0][0] < below:
            seconds, number, one = heapq.heappop(self._queue)
            if isinstance(one, Template):
                self._found.setdefault(one.kind(self._estimates), (seconds, one))
            elif (known := one.solve_draft(self._estimates, self._rows, self._place)) is not None:
                heapq.heappush(self._queue, (known[0], number, known[1]))
        found = itertools.islice(self._found.values(), count)
        return [template for seconds, template in found if seconds < below]


class Templates:
    """The fastest templates of each region, as many as are asked for."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.estimates = even_estimates(problem)
        self.classes = device_classes(problem)
        self._speeds = [math.fsum(device.speed for device in members) for members in self.classes]
        self._deals: dict[Region, list[Draft]] = {}
        self._found: dict[TemplateRegion, _Fastest] = {}

    def best(self, place: TemplateRegion, count: int, below: float = math.inf) -> list[Template]:
        """Return so many of the fastest for the rows that the region's speed stands for, fastest first.

        Those alone that take less than `below` seconds.
        """
        if place not in self._found:
            rows = self.rows_of(place.region)
            self._found[place] = _Fastest(place, rows, self.estimates, self.queue(place))
        return self._found[place].first(count, below)

    def queue(self, place: TemplateRegion) -> Iterator[Queued]:
        """Yield what there may be templates of."""
        yield from ((place.least_seconds(one.bounds), one) for one in self._drafts(place.region))

    def _drafts(self, region: Region) -> list[Draft]:
        """Return all deals of a region with their bounds."""
        if region not in self._deals:
            rows = self.rows_of(region)
            self._deals[region] = [Draft(d, d.bounds(self.estimates, rows)) for d in self._all(region, rows)]
        return self._deals[region]

    def rows_of(self, region: Region) -> int:
        """Return the rows of a step in proportion to speed."""
        share = math.fsum(self._speeds[number] for number in region) / math.fsum(self._speeds)
        return max(1, round(self._problem.costs.rows * share))

    def expected_seconds(self, chosen: Sequence[Template], regions: Sequence[Region]) -> float:
        """Return about what a step of templates of these regions takes, if each does rows as fast as those for it."""
        rows = list(map(self.rows_of, regions))
        rate = math.fsum(count / one.step_seconds(count) for one, count in zip(chosen, rows, strict=True))
        return self._problem.costs.rows / rate

    def _all(self, region: Region, rows: int) -> Iterator[DeviceAllotment]:
        for sizes in self._sizes(region):
            groups = [self._groups(number, size) for number, size in zip(region, sizes, strict=True)]
            for count in self._counts(groups, rows):
                for ordered in (groups,) if len(groups) == 1 else (groups, groups[::-1]):
                    yield from _deals_of(ordered, count)

    def _sizes(self, region: Region) -> Iterator[tuple[int, ...]]:
        """Yield a group size for each class."""
        costs, options = self._problem.costs, self._problem.options
        counts = [len(self.classes[number]) if options.tensor_parallel else 1 for number in region]
        choices = list(map(costs.group_sizes, counts))
        free = itertools.product(*choices)
        yield from (sizes for sizes in free if len(region) <= FREE_SIZES or len(set(sizes)) == 1)

    def _groups(self, number: int, size: int) -> list[tuple[int, ...]]:
        """Return groups of a class, inside nodes as far as these are large enough."""
        nodes = list(ranks_by_node(self.classes[number], self._problem.cluster).values())
        fits = any(len(ranks) >= size for ranks in nodes)
        runs = nodes if fits else [list(itertools.chain.from_iterable(nodes))]
        return [tuple(run[i : i + size]) for run in runs for i in range(0, len(run) - size + 1, size)]

    def _counts(self, groups: Sequence[Sequence[object]], rows: int) -> list[int]:
        """Return the numbers of pipelines to try."""
        blocks = self._problem.costs.num_blocks if self._problem.options.pipelines else 1
        pairs = ((found, stages) for found in groups for stages in stage_counts(len(found), blocks))
        counts = {min(rows, len(found) // stages) for found, stages in pairs}
        return sorted(count for count in counts if sum(len(found) // count for found in groups) <= max(1, blocks))
