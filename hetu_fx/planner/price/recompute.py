"""How few blocks each stage of a plan has to recompute so that it fits memory.

A block that is recomputed keeps what enters it, and takes its forward once more (Chen et al., Training Deep Nets with
Sublinear Memory Cost, section 4). The more blocks a stage recomputes the less it holds, so that the fewest that fit
are found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.placement import PlacedDevice, places_in
from hetu_fx.planner.price.step import memory_problems, predict
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan, Stage
from hetu_fx.plans.prediction import Prediction


def least_blocks(count: int, fits: Callable[[int], bool]) -> int | None:
    """Return the least number, 0 to `count`, of blocks recomputed that fits; None if not even all of them do."""
    if fits(0):
        return 0
    if not count or not fits(count):
        return None
    return bisect_left(range(1, count), True, key=fits) + 1


def fitted(plan: Plan, costs: ProgramCosts, cluster: Cluster, options: PlanOptions) -> tuple[Plan, Prediction] | None:
    """Return a plan with the least recompute that fits memory, and its prediction; None where nothing fits.

    Without `options.recompute` the plan is returned as it is, if it fits. Its blocks must be written out.
    """
    bare = _with_counts(plan, {}) if options.recompute else plan
    prediction = predict(bare, costs, cluster)
    if not memory_problems(prediction, cluster, options.memory_fraction):
        return bare, prediction
    counts = _least_counts(bare, costs, cluster, options.memory_fraction) if options.recompute else None
    if counts is None:
        return None
    found = _with_counts(bare, counts)
    return found, predict(found, costs, cluster)


def _least_counts(
    plan: Plan, costs: ProgramCosts, cluster: Cluster, fraction: float
) -> dict[tuple[int, int], int] | None:
    """Return how many blocks each (pipeline, stage) has to recompute; None where a device does not fit with all."""
    counts: dict[tuple[int, int], int] = {}
    for place in places_in(plan, costs, {device.rank: device.speed for device in cluster.devices}):
        limit = int(cluster.device(place.rank).memory_bytes * fraction)
        stage = plan.pipelines[place.pipeline].stages[place.stage]
        least = _least(place, stage, limit, costs.under(plan))
        if least is None:
            return None
        key = place.pipeline, place.stage
        counts[key] = max(counts.get(key, 0), least)
    return counts


def _least(place: PlacedDevice, stage: Stage, limit: int, costs: ProgramCosts) -> int | None:
    def fits(blocks: int) -> bool:
        own = costs.kept_by(replace(stage, recompute=blocks), place.piece.start)
        return sum(count for _, count in place.peak(replace(place.piece, costs=own))) <= limit

    return least_blocks(place.piece.stop - place.piece.start, fits)


def _with_counts(plan: Plan, counts: dict[tuple[int, int], int]) -> Plan:
    """Return the plan with so many blocks of each (pipeline, stage) recomputed, none where none are named."""
    if not counts and not any(stage.recompute for *_, stage in plan.stages):
        return plan
    pipelines = []
    for i, pipeline in enumerate(plan.pipelines):
        stages = [replace(stage, recompute=counts.get((i, j), 0)) for j, stage in enumerate(pipeline.stages)]
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))
