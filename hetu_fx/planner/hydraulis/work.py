"""What every device has to compute for a batch of sequences that has been assigned, so that its rate can be told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.dispatch.assignment import Assignment
from hetu_fx.planner.price.step import stage_costs
from hetu_fx.planner.values.lengths import costs_at
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan


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
