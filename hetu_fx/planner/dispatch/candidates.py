"""What Hydraulis' cost model knows of the pipelines of a plan: their times by length, and what they hold.

What every device has to compute for a batch of sequences that has been assigned, so that its rate can be told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.dispatch.assignment import ANY_LENGTH, Assignment, EligibleVariant
from hetu_fx.planner.dispatch.strategy import Scheme, TimeFit, fit_times
from hetu_fx.planner.price.step import end_seconds, ends_of, places_of, stage_costs
from hetu_fx.planner.values.lengths import costs_at
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan


def candidate_of(name: str, plan: Plan, by_length: Mapping[int, ProgramCosts], cluster: Cluster) -> EligibleVariant:
    """Return a plan as what may run a batch.

    Args:
        name: of the variant.
        plan: the plan.
        by_length: what a row costs, at three lengths at least.
        cluster: the devices.

    What a step takes besides the batch is gradient sync, gather and optimizer, as the cost model has them.

    A pipeline's micro-batch holds its `max_length`, or the plan's; what has neither holds any number of tokens.
    """
    some = next(iter(by_length.values()))
    written = plan.with_blocks(some.num_blocks)
    schemes = tuple(
        Scheme(len(pipeline.stages[0].devices), len(pipeline.stages), times_of(pipeline, by_length, cluster), held)
        for pipeline, held in ((p, p.max_length or plan.max_length or ANY_LENGTH) for p in written.pipelines)
    )
    ends = ends_of(written, places_of(written, some, cluster), cluster)
    return EligibleVariant(name, plan, schemes, end_seconds(ends))


def times_of(pipeline: Pipeline, by_length: Mapping[int, ProgramCosts], cluster: Cluster) -> TimeFit:
    """Fit the seconds that the slowest stage takes for a row of each length; `fixed` is what a micro-batch costs."""
    stages = {length: stage_costs(pipeline, costs, cluster) for length, costs in by_length.items()}
    fit = fit_times([(length, max(s.seconds.per_row for s in found)) for length, found in stages.items()]).fit
    fixed = max(stage.seconds.fixed for found in stages.values() for stage in found)
    return replace(fit, c=fit.c + fixed)


def device_seconds(
    assignment: Assignment, plan: Plan, by_length: Mapping[int, ProgramCosts], cluster: Cluster
) -> dict[int, float]:
    """Return the compute seconds, by rank, that an assignment is expected to take on healthy devices.

    Args:
        assignment: which micro-batch of which pipeline has which sequences.
        plan: that it is for.
        by_length: what a row costs, at three lengths at least.
        cluster: the devices.
    """
    written = plan.with_blocks(next(iter(by_length.values())).num_blocks)
    seconds: dict[int, float] = defaultdict(float)
    for pipeline, micro_batches in zip(written.pipelines, assignment.pipelines, strict=True):
        for micro in micro_batches:
            for stage in stage_costs(pipeline, costs_at(by_length, micro.width), cluster):
                for device, line in zip(stage.stage.devices, stage.compute, strict=True):
                    seconds[device] += line(len(micro.rows))
    return dict(seconds)
