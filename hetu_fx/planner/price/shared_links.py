"""What gradients and parameters want of links that groups share, at the end of a step.

Every range of blocks goes around the rings of those that hold the same of it, one of each pipeline; rings that leave a
node at the same time share its link, whichever range and whichever part of the weights they are of. A ring alone would
have the link for itself, which is what `step_end.sync_seconds` prices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.links import Resource, loads_of, turn_traffic
from hetu_fx.planner.price.placement import holders_of, stops_of
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan, Stage

Ring = tuple[int, ...]

Pair = tuple[float, float]
Sync = Callable[[float, Ring], Pair]
"""(gradient sync, gather) seconds of so many bytes over the ranks that hold them."""


def turn_loads(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> dict[Resource, float]:
    """Return the seconds for which one turn of all parameters keeps the links of nodes busy; none within one node."""
    total: dict[Resource, float] = {}
    if len({cluster.node_of(rank) for rank in plan.devices}) < 2:
        return total
    for start, stop, holders in _ranges(plan, costs):
        num_bytes, rings = costs.between(start, stop).parameter_bytes, rings_of(holders)
        for ring in rings:
            for resource, load in loads_of(turn_traffic(ring, num_bytes / len(rings), 1, cluster), cluster).items():
                if resource[0] in ("out of node", "into node"):
                    total[resource] = total.get(resource, 0.0) + load
    return total


def rings_of(holders: Sequence[Stage]) -> list[Ring]:
    """Return the rings that what these stages hold goes around, one for each part of its weights."""
    columns = [stage.context_groups for stage in holders]
    largest = max(map(len, columns))
    rings = ({rank for column in columns for rank in column[i % len(column)]} for i in range(largest))
    return [tuple(sorted(ring)) for ring in rings]


def meetings(holders: Sequence[Stage]) -> Iterator[tuple[Stage, int, Ring]]:
    """Yield for each device of these stages, by its place there, those that it meets: one of each other stage."""
    firsts = [stage.devices[0] for stage in holders]
    for number, stage in enumerate(holders):
        for position, rank in enumerate(stage.devices):
            others = *firsts[:number], *firsts[number + 1 :]
            yield stage, position, tuple(sorted((*others, rank, *stage.beside(rank))))


def unlike_ends(plan: Plan, costs: ProgramCosts, sync: Sync) -> dict[int, Pair]:
    """Return what `sync` says of each device's parameters, range by range, where pipelines are cut in unlike ways.

    Each range takes what the slowest of those takes that hold it. Empty where pipelines are cut alike, so that devices
    meet those at their own places.
    """
    total: dict[int, Pair] = {}
    if len({(p.blocks(costs.num_blocks), *(stage.axes for stage in p.stages)) for p in plan.pipelines}) == 1:
        return total
    for start, stop, holders in _ranges(plan, costs):
        found = {(_bytes(stage, place, start, stop, costs), ring) for stage, place, ring in meetings(holders)}
        pairs = [sync(*one) for one in sorted(found)]
        synced, gather = max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)
        for rank in (rank for stage in holders for rank in stage.devices):
            before = total.get(rank, (0.0, 0.0))
            total[rank] = before[0] + synced, before[1] + gather
    return total


def _bytes(stage: Stage, position: int, start: int, stop: int, costs: ProgramCosts) -> float:
    return costs.on(stage, position).between(start, stop).parameter_bytes_at(stage.work_shares[position])


def _ranges(plan: Plan, costs: ProgramCosts) -> Iterator[tuple[int, int, list[Stage]]]:
    """Yield ranges of blocks, and those that hold them, one stage of each pipeline."""
    stops = [stops_of(pipeline, costs.num_blocks) for pipeline in plan.pipelines]
    bounds = sorted({stop for own in stops for stop in own})
    for start, stop in pairwise(bounds) if len(bounds) > 1 else [(0, 0)]:
        yield start, stop, holders_of(start, plan, stops)
