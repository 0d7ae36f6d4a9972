"""What a plan becomes where some of its devices straggle: its other pipelines stay, theirs are mended.

In a pipeline with stragglers a group that has one is kept as it is, or goes on without it, or has it as a stage of its
own, what is left being cut in groups that divide the units; blocks move to the other stages, and rows to the other
pipelines (the moves of Malleus, SIGMOD 2025, inside the pipelines of a given plan). Malleus itself deals all groups
anew and minimises the seconds of a steady pipeline; what fills and empties it, and what follows it, is counted here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.estimates import Estimates, rules_of
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.regions import Estimated, estimate
from hetu_fx.planner.search.replica import Family
from hetu_fx.planner.search.templates import Template
from hetu_fx.plans.plan import Plan

Ranks = tuple[int, ...]


class Adapter:
    """Mends plans for the devices as they are now."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._estimates = Estimates(problem.costs, problem.cluster, rules_of(problem, problem.options.zero))
        self._speeds = {device.rank: device.speed for device in problem.cluster.devices}
        self._straggling = {device.rank for device in problem.cluster.devices if device.rate > 1.0}

    def adapted(self, plan: Plan) -> Estimated | None:
        """Return the plan for the devices as they are, with its estimated seconds; None if none fits.

        Shards of the plan are taken as even.
        """
        found = self._templates(plan)
        return estimate(found, self._problem, self._estimates) if found else None

    def _templates(self, plan: Plan) -> tuple[Template, ...]:
        """Return the pipelines, equal ones together; those that cannot be mended are left out."""
        families: dict[int, Family] = {}
        members: dict[int, list[Groups]] = {}
        rows = math.ceil(self._problem.costs.rows / len(plan.pipelines))
        for pipeline in plan.pipelines:
            mended = self._mended(tuple(stage.devices for stage in pipeline.stages), len(plan.pipelines), rows)
            if mended is not None:
                family, groups = mended
                families[id(family)] = family
                members.setdefault(id(family), []).append(groups)
        return tuple(Template(tuple(members[number]), family, 0.0) for number, family in families.items())

    def _mended(self, groups: Groups, count: int, rows: int) -> tuple[Family, Groups] | None:
        pairs = ((self._estimates.family(choice, count, rows), choice) for choice in self._choices(groups))
        fitting = [(family, choice) for family, choice in pairs if family is not None]
        return min(fitting, key=lambda pair: pair[0].seconds(rows), default=None)

    def _choices(self, groups: Groups) -> Iterator[Groups]:
        """Yield the pipelines that these stages may become."""
        if self._straggling.isdisjoint(itertools.chain.from_iterable(groups)):
            yield groups
            return
        for way in (self._kept, self._without, self._apart):
            made = tuple(itertools.chain.from_iterable(map(way, groups)))
            in_order = (made, tuple(sorted(made, key=self._speed)))
            yield from (some for some in dict.fromkeys(in_order) if some and self._is_allowed(some))

    def _kept(self, group: Ranks) -> Sequence[Ranks]:
        return (group,)

    def _without(self, group: Ranks) -> Sequence[Ranks]:
        """Return the group without stragglers, in parts that divide the units."""
        left = [rank for rank in group if rank not in self._straggling]
        return (group,) if len(left) == len(group) else list(self._parts(left))

    def _apart(self, group: Ranks) -> Sequence[Ranks]:
        """Return the group without stragglers, and each of these."""
        return [*self._without(group), *((rank,) for rank in group if rank in self._straggling)]

    def _parts(self, ranks: list[int]) -> Iterator[Ranks]:
        while ranks:
            size = max(size for size in range(1, len(ranks) + 1) if self._problem.costs.units % size == 0)
            yield tuple(ranks[:size])
            ranks = ranks[size:]

    def _speed(self, group: Ranks) -> float:
        return len(group) * min(self._speeds[rank] for rank in group)

    def _is_allowed(self, groups: Groups) -> bool:
        return self._problem.options.pipelines or len(groups) == 1
