"""Plans for devices of a few classes: the cluster is cut in regions, each of which has equal pipelines.

A region is some classes (devices that are alike) that follow each other in order of speed; some may be left out. Its
templates are equal pipelines over these, fastest first: with the same number of groups of each of its classes, the slow
ones in front (the front keeps more activations, and slow devices hold few blocks) or at the end. Blocks go to stages so
that these end together, within memory; rows go to regions so that those do. So two kinds become pipelines of both, or
pipelines of one kind each, whatever is faster: the shapes of the published plans for H800 beside H20 (Hetu v2, section
6.2).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetu_fx.cluster.cluster import Device
from hetu_fx.planner.price.bound import bound_seconds
from hetu_fx.planner.price.stage import FORWARD_AND_BACKWARD
from hetu_fx.planner.search.allocate import spread
from hetu_fx.planner.search.device_orders import Groups, alike_in, ranks_by_node
from hetu_fx.planner.search.estimates import NO_END, EndEstimate, Estimates, even_estimates
from hetu_fx.planner.search.homogeneous import best_priced, stage_counts
from hetu_fx.planner.search.problem import WORTH, Candidates, Problem, Search
from hetu_fx.planner.search.replica import Family
from hetu_fx.planner.search.splits import in_all_splits
from hetu_fx.plans.plan import Pipeline, Plan

MOST_CLASSES = 6
"""So many classes of devices are few."""

KEPT = 16
"""So many templates of a region are tried; fewer where they are combined with those of others."""

FREE_SIZES = 2
"""In regions of more classes, all groups have one size."""

Region = tuple[int, ...]
"""Numbers of classes, slowest first."""


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
        alone, beside = (estimates.shared_bytes(pipelines, replica, are_all=are_all) for are_all in (True, False))
        crossing = estimates.crossing_seconds(pipelines, replica)
        made = cls(pipelines, family, shared_bytes=beside, crossing_seconds=crossing)
        end = estimates.ends([replica], *made.ends, zero, alone if is_alone else beside)
        return replace(made, family=family.hiding(end.gradients, zero), end=end, known={})

    def kind(self, estimates: Estimates) -> Hashable:
        """Return what templates have in common whose pipelines take the same, and are as many."""
        blocks = tuple([stage.blocks for stage in self.family.replica.pipeline.stages])
        return estimates.key(self.pipelines[0]), blocks, len(self.pipelines), self.shared_bytes, self.crossing_seconds

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


@dataclass(frozen=True, slots=True)
class Deal:
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
        turns = estimates.least_turns(pipelines)
        return DealBounds(estimates.bounds(pipelines[0], self.rows(rows)), len(pipelines[0]), *turns)

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
        alone, beside: those of a turn of all parameters, by itself and with other pipelines.
    """

    pipeline: tuple[tuple[float, int], ...]
    stages: int
    alone: float
    beside: float


@dataclass(frozen=True, slots=True)
class Place:
    """What templates are for: a region, with states as given, alone or beside others."""

    region: Region
    zero: int
    is_alone: bool = True

    def least_seconds(self, bounds: DealBounds) -> float:
        """Return what a step takes at least.

        Gradients travel beside the last backward, which is its share of what a micro-batch takes in all stages.
        """
        turn = bounds.alone if self.is_alone else bounds.beside
        share = (1 - 1 / FORWARD_AND_BACKWARD) * bounds.stages
        hidden = ((seconds, share * seconds / (bounds.stages + count - 1)) for seconds, count in bounds.pipeline)
        if self.zero:
            return min(seconds + turn + max(0.0, turn - most) for seconds, most in hidden)
        return min(seconds + max(0.0, 2 * turn - most) for seconds, most in hidden)


@dataclass(frozen=True, slots=True)
class Draft:
    """A deal with its bounds, and how its pipelines run if that is known."""

    deal: Deal
    bounds: DealBounds
    family: Family | None = None

    def worked_out(self, estimates: Estimates, rows: int, place: Place) -> Queued | None:
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


def classes_of(problem: Problem) -> list[tuple[Device, ...]]:
    """Return the devices of each class, slowest class first."""
    found = sorted(alike_in(problem.cluster), key=lambda alike: (alike.one.speed, alike.one.kind, alike.memory_bytes))
    return [alike.devices for alike in found]


class _Fastest:
    """The templates for a place, those first that are fastest with what ends a step, as far as they are asked for.

    Blocks are dealt, and then the end of a step priced, as long as either can matter.
    """

    def __init__(self, place: Place, rows: int, estimates: Estimates, queue: Iterable[Queued]) -> None:
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
            elif (known := one.worked_out(self._estimates, self._rows, self._place)) is not None:
                heapq.heappush(self._queue, (known[0], number, known[1]))
        found = itertools.islice(self._found.values(), count)
        return [template for seconds, template in found if seconds < below]


class Templates:
    """The fastest templates of each region, as many as are asked for."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.estimates = even_estimates(problem)
        self.classes = classes_of(problem)
        self._deals: dict[Region, list[Draft]] = {}
        self._found: dict[Place, _Fastest] = {}

    def best(self, place: Place, count: int, below: float = math.inf) -> list[Template]:
        """Return so many of the fastest for the rows that the region's speed stands for, fastest first.

        Those alone that take less than `below` seconds.
        """
        if place not in self._found:
            rows = self.rows_of(place.region)
            self._found[place] = _Fastest(place, rows, self.estimates, self.queue(place))
        return self._found[place].first(count, below)

    def queue(self, place: Place) -> Iterator[Queued]:
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
        speeds = [math.fsum(device.speed for device in members) for members in self.classes]
        share = math.fsum(speeds[number] for number in region) / math.fsum(speeds)
        return max(1, round(self._problem.costs.rows * share))

    def _all(self, region: Region, rows: int) -> Iterator[Deal]:
        for sizes in self._sizes(region):
            groups = [self._groups(number, size) for number, size in zip(region, sizes, strict=True)]
            for count in self._counts(groups, rows):
                for ordered in (groups,) if len(groups) == 1 else (groups, groups[::-1]):
                    yield from _deals(ordered, count)

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


def _deals(groups: Sequence[Sequence[tuple[int, ...]]], count: int) -> Iterator[Deal]:
    """Yield the ways to make so many pipelines with as many groups of each class."""
    each = [len(found) // count for found in groups]
    if all(each):
        yield Deal(groups, count)
        if count > 1 and max(each) > 1:
            yield Deal(groups, count, is_apart=True)


def cuts(classes: Region) -> Iterator[tuple[Region, ...]]:
    """Yield the ways to cut classes in runs, and to leave some runs out; some ways come more than once."""
    if not classes:
        yield ()
    for stop in range(1, len(classes) + 1):
        for rest in cuts(classes[stop:]):
            yield (classes[:stop], *rest)
            yield rest


@dataclass(frozen=True, slots=True)
class Estimated:
    """Templates of the regions of a cut with their rows, and the seconds that they are estimated to take."""

    seconds: float
    chosen: tuple[Template, ...]
    rows: tuple[int, ...]

    @property
    def zero(self) -> int:
        """Return how optimizer states are kept."""
        return self.chosen[0].family.rules.zero

    def plan(self, problem: Problem) -> Plan:
        """Return the plan."""
        pairs = zip(self.chosen, self.rows, strict=True)
        made = (pipeline for template, count in pairs for pipeline in template.made(count))
        plan = problem.plan(sorted(made, key=lambda pipeline: min(pipeline.devices)))
        return replace(plan, zero=self.zero)


def estimated(problem: Problem, templates: Templates | None = None) -> Iterator[Estimated]:
    """Yield what plans of templates are estimated to take, those of this module unless others are given."""
    templates, least = Templates(problem) if templates is None else templates, math.inf
    asked = itertools.product(_cuts_by_speed(problem, templates.classes), reversed(range(problem.options.zero + 1)))
    for (bound, cut), zero in asked:
        if problem.time_limit.ends(least < math.inf):
            return
        if bound > WORTH * least:
            break
        places = [Place(region, zero, len(cut) == 1) for region in cut]
        count = max(1, KEPT >> 2 * (len(cut) - 1))
        below = WORTH * least if len(cut) == 1 else math.inf
        for chosen in itertools.product(*(templates.best(place, count, below) for place in places)):
            is_single = sum(len(template.pipelines) for template in chosen) == 1  # states are whole in any case
            made = None if is_single and zero < problem.options.zero else estimate(chosen, problem, templates.estimates)
            if made is not None:
                least = min(least, made.seconds)
                yield made


def _cuts_by_speed(problem: Problem, classes: Sequence[Sequence[Device]]) -> list[tuple[float, tuple[Region, ...]]]:
    """Return the cuts in order of seconds that no plan of their devices is below."""
    found = []
    for cut in filter(None, dict.fromkeys(cuts(tuple(range(len(classes)))))):
        devices = itertools.chain.from_iterable(classes[number] for region in cut for number in region)
        part = replace(problem.cluster, devices=tuple(devices))
        found.append((bound_seconds(problem.costs, part), cut))
    return sorted(found, key=lambda pair: pair[0])


def estimate(chosen: tuple[Template, ...], problem: Problem, estimates: Estimates) -> Estimated | None:
    """Return the templates with the rows that let them end together; None where one cannot do its rows."""
    rows = _rows_of_templates(chosen, problem.costs.rows)
    if rows is None:
        return None
    longest, end = max(map(Template.seconds, chosen, rows)), _end_of(chosen, estimates)
    hidden = min(template.hidden(end.gradients, count) for template, count in zip(chosen, rows, strict=True))
    return Estimated(longest + end.seconds(hidden), chosen, rows)


def _rows_of_templates(chosen: Sequence[Template], total: int) -> tuple[int, ...] | None:
    """Return the rows of each region; None where one that must have some cannot do them."""
    counts = [len(template.pipelines) for template in chosen]
    rows = spread(total, [template.step_seconds for template in chosen], low=counts)
    fits = rows is not None and all(t.seconds(n) < math.inf for t, n in zip(chosen, rows, strict=True))
    return rows if fits else None


def _end_of(chosen: Sequence[Template], estimates: Estimates) -> EndEstimate:
    """Return what ends a step of all these templates."""
    if len(chosen) == 1:
        return chosen[0].end
    firsts = [first for template in chosen for first in template.ends[0]]
    replicas = [template.family.replica for template in chosen]
    shared, zero = max(template.shared_bytes for template in chosen), chosen[0].family.rules.zero
    return estimates.ends(replicas, firsts, chosen[0].ends[1], zero, shared)


def _find(problem: Problem) -> Candidates:
    problem.tell(f"classes: {len(classes_of(problem))} classes of devices")
    return best_priced(estimated(problem), problem)


def _lacks(problem: Problem) -> str:
    count = len(classes_of(problem))
    if count <= MOST_CLASSES:
        return ""
    return f"it plans for up to {MOST_CLASSES} classes (kind, speed, memory) of devices, but there are {count}"


CLASSES = Search(
    name="classes",
    applies="devices of a few kinds: equal pipelines over one kind or several, blocks and rows by speed and memory",
    lacks=_lacks,
    find=in_all_splits(_find),
)
