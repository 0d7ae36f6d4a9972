"""Plans for devices of a few classes: the cluster is cut in regions, each of which has equal pipelines.

A region is some classes (kind, speed, memory) that follow each other in order of speed; some may be left out. Its
pipelines have the same number of groups of each of its classes, the slow ones in front (the front keeps more
activations, and slow devices hold few blocks) or at the end. Blocks go to stages so that these end together, within
memory; rows go to regions so that those do. So two kinds become pipelines of both, or pipelines of one kind each,
whatever is faster: the shapes of the published plans for H800 beside H20 (Hetu v2, section 6.2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hetu_fx.planner.allocate import spread
from hetu_fx.planner.replica import Family
from hetu_fx.planner.search.blocks import Balance
from hetu_fx.planner.search.estimates import DeviceClass, Estimates, class_of, rules_of
from hetu_fx.planner.search.homogeneous import best_priced, finalists, stage_counts
from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.planner.space import Groups
from hetu_fx.plans import Pipeline, Plan
from hetu_fx.topology import Device

MOST_CLASSES = 6
"""So many classes of devices are few."""

_KEPT = 16  # templates of a region that are tried; fewer where they are combined with those of others
_FREE_SIZES = 2  # in regions of more classes, all groups have one size

Region = tuple[int, ...]
"""Numbers of classes, slowest first."""


@dataclass(frozen=True, slots=True)
class Template:
    """Equal pipelines over a region, the ways to run one of them, and the seconds at the end of a step."""

    pipelines: tuple[Groups, ...]
    family: Family
    end_seconds: float

    @property
    def ends(self) -> tuple[list[int], int]:
        """Return the first device of each pipeline, and the last of the first one."""
        return [groups[0][0] for groups in self.pipelines], self.pipelines[0][-1][-1]

    def seconds(self, rows: int) -> float:
        """Return the seconds of so many rows over all pipelines."""
        return self.family.seconds(math.ceil(rows / len(self.pipelines)))

    def made(self, rows: int) -> Iterator[Pipeline]:
        """Yield the pipelines with their rows."""
        count = len(self.pipelines)
        for index, groups in enumerate(self.pipelines):
            share = rows // count + (index < rows % count)
            yield self.family.on(groups).pipeline(share)


def classes_of(problem: Problem) -> dict[DeviceClass, list[Device]]:
    """Return the devices of each class, slowest class first."""
    found: dict[DeviceClass, list[Device]] = {}
    for device in sorted(problem.cluster.devices, key=lambda device: (device.speed, class_of(device), device.rank)):
        found.setdefault(class_of(device), []).append(device)
    return found


def cuts(classes: Region) -> Iterator[tuple[Region, ...]]:
    """Yield the ways to cut classes in runs, and to leave some runs out."""
    if not classes:
        yield ()
    for stop in range(1, len(classes) + 1):
        for rest in cuts(classes[stop:]):
            yield (classes[:stop], *rest)
            yield rest


class Templates:
    """The fastest templates of each region."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self.estimates = problem, Estimates(problem)
        self._rules = rules_of(problem, problem.options.zero)
        self._balance = Balance(self.estimates, problem.costs, self._rules)
        self.classes = list(classes_of(problem).values())
        self._found: dict[Region, list[Template]] = {}

    def best(self, region: Region) -> list[Template]:
        """Return the fastest for the rows that the region's speed stands for, fastest first."""
        if region not in self._found:
            rows = self.rows_of(region)
            made = sorted(self._all(region, rows), key=lambda made: made.seconds(rows) + made.end_seconds)
            self._found[region] = made[:_KEPT]
        return self._found[region]

    def rows_of(self, region: Region) -> int:
        """Return the rows of a step in proportion to speed."""
        speeds = [math.fsum(device.speed for device in members) for members in self.classes]
        share = math.fsum(speeds[number] for number in region) / math.fsum(speeds)
        return max(1, round(self._problem.costs.rows * share))

    def _all(self, region: Region, rows: int) -> Iterator[Template]:
        for sizes in self._sizes(region):
            groups = [self._groups(number, size) for number, size in zip(region, sizes, strict=True)]
            for count in self._counts(groups, rows):
                for ordered in (groups,) if len(groups) == 1 else (groups, groups[::-1]):
                    for pipelines in _dealt(ordered, count):
                        yield from self._template(pipelines, rows)

    def _sizes(self, region: Region) -> Iterator[tuple[int, ...]]:
        """Yield a group size for each class."""
        costs, options = self._problem.costs, self._problem.options
        units = costs.units if options.tensor_parallel else 1
        choices = [
            [size for size in range(1, min(units, len(self.classes[number])) + 1) if units % size == 0]
            for number in region
        ]
        free = itertools.product(*choices)
        yield from (sizes for sizes in free if len(region) <= _FREE_SIZES or len(set(sizes)) == 1)

    def _groups(self, number: int, size: int) -> list[tuple[int, ...]]:
        """Return groups of a class, inside nodes as far as these are large enough."""
        nodes: dict[str, list[int]] = {}
        for device in self.classes[number]:
            nodes.setdefault(device.node, []).append(device.rank)
        fits = any(len(ranks) >= size for ranks in nodes.values())
        runs = list(nodes.values()) if fits else [list(itertools.chain.from_iterable(nodes.values()))]
        return [tuple(run[i : i + size]) for run in runs for i in range(0, len(run) - size + 1, size)]

    def _counts(self, groups: Sequence[Sequence[object]], rows: int) -> list[int]:
        """Return the numbers of pipelines to try."""
        blocks = self._problem.costs.num_blocks if self._problem.options.pipelines else 1
        pairs = ((found, stages) for found in groups for stages in stage_counts(len(found), blocks))
        counts = {min(rows, len(found) // stages) for found, stages in pairs}
        return sorted(count for count in counts if sum(len(found) // count for found in groups) <= max(1, blocks))

    def _template(self, pipelines: tuple[Groups, ...], rows: int) -> Iterator[Template]:
        """Yield the template of equal pipelines, if it fits memory."""
        count, zero = len(pipelines), self._problem.options.zero
        family = self._balance.family(pipelines[0], count, math.ceil(rows / count))
        if family is not None:
            made = Template(pipelines, family, 0.0)
            yield replace(made, end_seconds=self.estimates.ends([family.replica], *made.ends, zero))


def _dealt(groups: Sequence[Sequence[tuple[int, ...]]], count: int) -> Iterator[tuple[Groups, ...]]:
    """Yield so many pipelines with as many groups of each class: of neighbours, and of groups that stand far apart."""
    pairs = [(found, len(found) // count) for found in groups]
    if all(each for _, each in pairs):
        chunks = ([found[i * each : (i + 1) * each] for found, each in pairs] for i in range(count))
        yield tuple(tuple(itertools.chain.from_iterable(chunk)) for chunk in chunks)
        if count > 1 and any(each > 1 for _, each in pairs):
            strides = ([found[i : each * count : count] for found, each in pairs] for i in range(count))
            yield tuple(tuple(itertools.chain.from_iterable(stride)) for stride in strides)


def estimated(problem: Problem) -> Iterator[tuple[float, Plan]]:
    """Yield plans and the seconds that they are estimated to take."""
    templates = Templates(problem)
    for cut in cuts(tuple(range(len(templates.classes)))):
        kept = [templates.best(region)[: max(1, _KEPT >> 2 * (len(cut) - 1))] for region in cut]
        for chosen in itertools.product(*kept) if cut else ():
            rows = rows_of_templates(chosen, problem.costs.rows)
            if rows is not None:
                yield seconds_of(chosen, rows, problem, templates.estimates), plan_of(chosen, rows, problem)


def rows_of_templates(chosen: Sequence[Template], total: int) -> tuple[int, ...] | None:
    """Return the rows of each region; None where one that must have some cannot do them."""
    counts = [len(template.pipelines) for template in chosen]
    rows = spread(total, [cache(template.seconds) for template in chosen], low=counts)
    fits = rows is not None and all(t.seconds(n) < math.inf for t, n in zip(chosen, rows, strict=True))
    return rows if fits else None


def seconds_of(chosen: Sequence[Template], rows: Sequence[int], problem: Problem, estimates: Estimates) -> float:
    longest = max(template.seconds(count) for template, count in zip(chosen, rows, strict=True))
    firsts = [first for template in chosen for first in template.ends[0]]
    replicas = [template.family.replica for template in chosen]
    return longest + estimates.ends(replicas, firsts, chosen[0].ends[1], problem.options.zero)


def plan_of(chosen: Sequence[Template], rows: Sequence[int], problem: Problem) -> Plan:
    options = problem.options
    pipelines = [p for template, count in zip(chosen, rows, strict=True) for p in template.made(count)]
    pipelines.sort(key=lambda pipeline: min(pipeline.devices))
    return Plan(tuple(pipelines), options.schedule, options.zero, options.name, options.max_length)


def _find(problem: Problem) -> Candidates:
    problem.tell(f"classes: {len(classes_of(problem))} classes of devices")
    found = sorted(estimated(problem), key=lambda pair: pair[0])
    most = finalists(len(problem.cluster.devices))
    return best_priced(list(dict.fromkeys(plan for _, plan in found[: 4 * most])), problem, most)


def _lacks(problem: Problem) -> str:
    count = len(classes_of(problem))
    if count <= MOST_CLASSES:
        return ""
    return f"it plans for up to {MOST_CLASSES} classes (kind, speed, memory) of devices, but there are {count}"


CLASSES = Search(
    name="classes",
    applies="devices of a few kinds: equal pipelines over one kind or several, blocks and rows by speed and memory",
    lacks=_lacks,
    find=_find,
)
