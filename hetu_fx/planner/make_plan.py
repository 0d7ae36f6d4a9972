"""Find the fastest plan: program, cluster, space, cost and search meet here.

The result is a function of the arguments alone, so every rank that has them finds the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetu_fx.errors import PlanError
from hetu_fx.planner.contiguous import search
from hetu_fx.planner.cost import predict
from hetu_fx.planner.program import ProgramCosts
from hetu_fx.planner.space import PlanOptions
from hetu_fx.plans import Plan, Stage
from hetu_fx.topology import Cluster

NEGLIGIBLE = 0.01
"""A plan slower by less than this is as good: predictions are not that exact."""

__all__ = ["PlanOptions", "make_plan"]


def make_plan(costs: ProgramCosts, cluster: Cluster, *, options: PlanOptions | None = None) -> Plan:
    """Return the plan of least predicted seconds that fits memory, with its prediction and the runner-up.

    Raises `PlanError` when no plan fits, with what the one that needs least lacks.
    """
    options = options or PlanOptions()
    found = search(costs, cluster, options) or search(costs, cluster, _thinner(costs, options))
    if not found:
        raise PlanError(_nothing_fits(costs, cluster, options))
    best = _simplest(found)
    prediction = predict(best, costs, cluster)
    others = [plan for plan in found if _shape(plan, cluster) != _shape(best, cluster)]
    if others:
        second = min(others, key=lambda plan: (found[plan], plan.summary()))
        runner_up, seconds = second.summary(), found[second]
        prediction = replace(prediction, runner_up=runner_up, runner_up_seconds=seconds)
    return replace(best, predicted=prediction)


def _simplest(found: Mapping[Plan, float]) -> Plan:
    """Return the plan with the fewest stages and shards of those negligibly slower than the best."""
    limit = min(found.values()) * (1 + NEGLIGIBLE)
    near = [plan for plan, seconds in found.items() if seconds <= limit]
    return min(near, key=lambda plan: (_num_seams(plan), found[plan], plan.summary()))


def _num_seams(plan: Plan) -> int:
    """Return how many devices work with another one inside a replica: what may be mispredicted."""
    return len(plan.devices) - len(plan.pipelines)


def _shape(plan: Plan, cluster: Cluster) -> object:
    """Return what makes a plan different from others that only swap equal devices or shift rows."""
    shapes = [[_stage_shape(stage, cluster) for stage in pipeline.stages] for pipeline in plan.pipelines]
    return sorted(sorted(shape) for shape in shapes)


def _stage_shape(stage: Stage, cluster: Cluster) -> tuple[list[float], int]:
    return sorted(cluster.device(rank).speed for rank in stage.devices), stage.blocks or 0


def _thinner(costs: ProgramCosts, options: PlanOptions) -> PlanOptions:
    """Return the options with more micro-batches to choose from, so that each keeps less; 1 stays 1."""
    most = options.micro_batches[-1]
    doubled = (most << i for i in range(1, costs.rows.bit_length()))
    more = tuple(count for count in doubled if most > 1 and count <= costs.rows)
    return replace(options, micro_batches=options.micro_batches + more)


def _nothing_fits(costs: ProgramCosts, cluster: Cluster, options: PlanOptions) -> str:
    need, have = 4 * costs.whole.parameter_bytes, sum(device.memory_bytes for device in cluster.devices)
    return (
        f"no plan fits the memory of devices {list(cluster.ranks)}: parameters, gradients and optimizer "
        f"states are {need / 1e6:.4g} MB, one row keeps {costs.whole.activation_bytes / 1e6:.4g} MB of "
        f"activations; the devices have {have / 1e6:.4g} MB together, {options.memory_fraction:.0%} of which "
        f"may be used; use more or larger devices, or shorter sequences"
    )
