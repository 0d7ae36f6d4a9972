"""The fastest templates of a region: deals are worked out as far as they can be among these."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence

from hetu_fx.cluster.cluster import Device
from hetu_fx.planner.search.deals import DeviceAllotment, Draft, Queued, Region, TemplateRegion, deals_of
from hetu_fx.planner.search.device_orders import alike_in, ranks_by_node
from hetu_fx.planner.search.estimates import Estimates, even_estimates
from hetu_fx.planner.search.homogeneous import stage_counts
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.template import Template

FREE_SIZES = 2
"""In regions of more classes, all groups have one size."""


def classes_of(problem: Problem) -> list[tuple[Device, ...]]:
    """Return the devices of each class, slowest class first."""
    found = sorted(alike_in(problem.cluster), key=lambda alike: (alike.one.speed, alike.one.kind, alike.memory_bytes))
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
                    yield from deals_of(ordered, count)

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
