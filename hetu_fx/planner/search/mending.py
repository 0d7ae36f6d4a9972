"""Plans that are mended: for devices that straggle, or that are not there.

Their other pipelines stay. In a pipeline with stragglers a group that has one is kept as it is, or goes on without it,
or has it as a stage of its own; without devices that are lost it goes on in any case. What is left of a group is cut in
groups that divide the units; blocks move to the other stages, and rows to the other pipelines (the moves of Malleus,
SIGMOD 2025, inside the pipelines of a given plan; Hetu v2, appendix C, runs such plans on what is left of a cluster).

Nodes of unequal sizes are planned for so too: where a device of a node is lost, or kept for something else, no equal
groups fit all that are left. A plan as if all nodes of a kind were full goes on without what these lack.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.planner.search.cluster_regions import MOST_CLASSES, TimedTemplates, estimate, estimate_templates
from hetu_fx.planner.search.device_orders import Groups, devices_by_likeness, ranks_by_node
from hetu_fx.planner.search.estimates import even_estimates
from hetu_fx.planner.search.homogeneous import TimedArrangement, candidates, price_best_plans
from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.planner.search.replica import Family
from hetu_fx.planner.search.templates import Template, device_classes
from hetu_fx.plans.plan import Plan

Ranks = tuple[int, ...]

MOST_LACKING = 0.25
"""Of the devices of a kind, so large a share may be lacking in nodes that are taken for full."""

MOST_ADAPTED = 6
"""So many plans for all devices as they should be, of each search for them, are mended."""


class Mending:
    """Mends plans for the devices as they are now."""

    def __init__(self, problem: Problem, lost: Collection[int] = ()) -> None:
        """`lost` are devices of the plans that the problem's cluster has not."""
        self._problem, self._lost = problem, frozenset(lost)
        self._estimates = even_estimates(problem)
        self._speeds = {device.rank: device.speed for device in problem.cluster.devices}
        self._straggling = {device.rank for device in problem.cluster.devices if device.rate > 1.0}

    def adapt_plan(self, plan: Plan) -> TimedTemplates | None:
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
        pairs = ((tuple(members[number]), family) for number, family in families.items())
        return tuple(Template.of(*pair, self._estimates, plan.zero) for pair in pairs)

    def _mended(self, groups: Groups, count: int, rows: int) -> tuple[Family, Groups] | None:
        pairs = ((self._estimates.family(choice, count, rows), choice) for choice in self._choices(groups))
        fitting = [(family, choice) for family, choice in pairs if family is not None]
        return min(fitting, key=lambda pair: pair[0].seconds(rows), default=None)

    def _choices(self, groups: Groups) -> Iterator[Groups]:
        """Yield the pipelines that these stages may become."""
        groups = tuple(itertools.chain.from_iterable(self._without(group, self._lost) for group in groups))
        if not groups:
            return
        if self._straggling.isdisjoint(itertools.chain.from_iterable(groups)):
            yield groups
            return
        for way in (self._kept, self._alone, self._apart):
            made = tuple(itertools.chain.from_iterable(map(way, groups)))
            in_order = (made, tuple(sorted(made, key=self._speed)))
            most = math.inf if self._problem.options.pipelines else 1
            yield from (some for some in dict.fromkeys(in_order) if 0 < len(some) <= most)

    def _kept(self, group: Ranks) -> Sequence[Ranks]:
        return (group,)

    def _alone(self, group: Ranks) -> Sequence[Ranks]:
        return self._without(group, self._straggling)

    def _without(self, group: Ranks, others: Collection[int]) -> Sequence[Ranks]:
        """Return the group without some devices, in parts that divide the units."""
        left = [rank for rank in group if rank not in others]
        return (group,) if len(left) == len(group) else list(self._parts(left))

    def _apart(self, group: Ranks) -> Sequence[Ranks]:
        """Return the group without stragglers, and each of these."""
        return [*self._alone(group), *((rank,) for rank in group if rank in self._straggling)]

    def _parts(self, ranks: list[int]) -> Iterator[Ranks]:
        while ranks:
            size = max(size for size in range(1, len(ranks) + 1) if self._problem.costs.units % size == 0)
            yield tuple(ranks[:size])
            ranks = ranks[size:]

    def _speed(self, group: Ranks) -> float:
        return len(group) * min(self._speeds[rank] for rank in group)


def mend_best_plans(
    problem: Problem, whole: Problem, even: Sequence[TimedArrangement], lost: Collection[int] = ()
) -> dict[Plan, float]:
    """Return what the best plans for a whole cluster become on the problem's, which lacks some devices perhaps.

    `even` are homogeneous plans for the whole.
    """
    mending, few = Mending(problem, lost), len(device_classes(whole)) <= MOST_CLASSES
    templates = sorted(estimate_templates(whole), key=lambda one: one.seconds) if few else []
    unlike = {tuple(template.pipelines for template in one.chosen): one for one in reversed(templates)}
    uneven = sorted(unlike.values(), key=lambda one: one.seconds)[:MOST_ADAPTED]
    first = {candidate.arrangement: candidate for candidate in reversed(even)}
    chosen = sorted(first.values(), key=lambda candidate: candidate.seconds)[:MOST_ADAPTED]
    plans = dict.fromkeys([*(one.plan(whole) for one in uneven), *(one.plan(whole) for one in chosen)])
    made = (mending.adapt_plan(plan) for plan in plans)
    return price_best_plans((one for one in made if one is not None), problem)


def lacking(cluster: Cluster) -> tuple[Device, ...]:
    """Return the devices that nodes have less than the largest one of their kind, where these are few; new ranks."""
    ranks = itertools.count(max(cluster.ranks) + 1)
    return tuple(replace(one, rank=next(ranks)) for one in _copied(cluster))


def _copied(cluster: Cluster) -> Iterator[Device]:
    """Yield a device of a node as often as one like it is lacking there."""
    for alike in devices_by_likeness(cluster):
        nodes = list(ranks_by_node(alike.devices, cluster).values())
        most = max(map(len, nodes))
        if most * len(nodes) - len(alike.devices) <= MOST_LACKING * len(alike.devices):
            for found in nodes:
                yield from itertools.repeat(cluster.device(found[0]), most - len(found))


def _find(problem: Problem) -> Candidates:
    added = lacking(problem.cluster)
    if not added:
        return {}
    problem.tell(f"ragged: as if there were {len(added)} devices more")
    cluster = replace(problem.cluster, devices=(*problem.cluster.devices, *added))
    whole = replace(problem, cluster=cluster)
    even = sorted(candidates(whole), key=lambda one: one.seconds)
    return mend_best_plans(problem, whole, even, [device.rank for device in added])


RAGGED = Search(
    name="ragged",
    applies="nodes of a kind have different numbers of devices: plans for full nodes, without what is lacking",
    lacks=lambda problem: "" if lacking(problem.cluster) else "all nodes of a kind have as many devices",
    find=_find,
)
