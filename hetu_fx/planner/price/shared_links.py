"""What gradients and parameters want of links that groups share, at the end of a step.

Every range of blocks goes around the rings of those that hold the same of it, one of each pipeline; rings that leave a
node at the same time share its link, whichever range and whichever part of the weights they are of. A ring alone would
have the link for itself, which is what `step_end.sync_seconds` prices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.links import Resource, loads_of, turn_traffic
from hetu_fx.planner.price.placement import holders_of, stops_of
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan, Stage

Ring = tuple[int, ...]


def turn_loads(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> dict[Resource, float]:
    """Return the seconds for which one turn of all parameters keeps the links of nodes busy; none within one node."""
    total: dict[Resource, float] = {}
    if len({cluster.node_of(rank) for rank in plan.devices}) < 2:
        return total
    for holders, num_bytes in _ranges(plan, costs):
        rings = rings_of(holders)
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


def _ranges(plan: Plan, costs: ProgramCosts) -> Iterator[tuple[list[Stage], float]]:
    """Yield those that hold a range of blocks, one stage of each pipeline, and the bytes of its parameters."""
    stops = [stops_of(pipeline, costs.num_blocks) for pipeline in plan.pipelines]
    bounds = sorted({stop for own in stops for stop in own})
    for start, stop in pairwise(bounds) if len(bounds) > 1 else [(0, 0)]:
        yield holders_of(start, plan, stops), costs.between(start, stop).parameter_bytes
