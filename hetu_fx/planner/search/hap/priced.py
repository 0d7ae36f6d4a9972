"""What plans take by HAP's prices: programs, one group, rows for each device, all by what the passes deduce of them."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.count.graph_problem import GraphProblem
from hetu_fx.planner.search.hap.assemble import HapResult
from hetu_fx.planner.search.hap.executed import executed
from hetu_fx.planner.search.hap.played import PlayedStep
from hetu_fx.planner.search.hap.prices import Collectives, RatioPrices
from hetu_fx.planner.search.hap.search import bytes_of
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.axis import AxisDeduction
from hetu_fx.transforms.layouts.deduce import Deduce
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.program_choices import segments
from hetu_fx.transforms.specialize.specialize import Specialize


def run_of(problem: GraphProblem, plan: Plan, cluster: Cluster, *, collectives: Collectives | None = None) -> HapResult:
    """Return the program that a plan runs on its devices, at its ratios (of each segment), with its seconds.

    Raises `PlanError` for a plan of stages or of grids, which is no program of all devices, and what the passes raise
    for one that they refuse.
    """
    return _run_of(problem, plan, _deduced(problem, plan, cluster), cluster, collectives)


def _run_of(
    problem: GraphProblem, plan: Plan, deduced: DeducedGraph, cluster: Cluster, collectives: Collectives | None = None
) -> HapResult:
    axis, shares = _axis(plan, deduced)
    cluster = cluster.without([rank for rank in cluster.ranks if rank not in plan.devices])
    devices = [cluster.device(rank) for rank in plan.devices]
    program = problem.program.at(fmean(device.flops_per_byte for device in devices))
    speeds = tuple(device.speed for device in devices)
    ratios = tuple(tuple(share / sum(each) for share in each) for each in shares)
    prices = RatioPrices(speeds, collectives or Collectives.of_cluster(cluster), ratios)
    found = executed(replace(problem, program=program), axis, prices)
    return HapResult(
        program=found,
        ratios=ratios,
        seconds=found.seconds(speeds, ratios),
        ranks=plan.devices,
        speeds=speeds,
        held=bytes_of(found, program, zero=plan.zero),
        rounds=(),
        num_states=0,
        is_exact=True,
    )


def _deduced(problem: GraphProblem, plan: Plan, cluster: Cluster) -> DeducedGraph:
    return Deduce(cluster)(Annotate(plan, wants_values=False)(problem.analysed))


def played_step(problem: GraphProblem, plan: Plan, costs: ProgramCosts, cluster: Cluster) -> PlayedStep:
    """Return a step under a plan with a program, on paper, which others are simulated for.

    `costs` are those of the program. Raises as `run_of` does, and where no graph of a device can be made.
    """
    deduced = _deduced(problem, plan, cluster)
    Specialize(plan.devices[0])(deduced)
    run = _run_of(problem, plan, deduced, cluster)
    return PlayedStep(run, problem.program.by_name, costs, cluster, plan.zero)


def _axis(plan: Plan, deduced: DeducedGraph) -> tuple[AxisDeduction, tuple[tuple[int, ...], ...]]:
    """Return the axis that all devices of a plan stand along, and their shares in each segment."""
    stages = [stage for *_, stage in plan.stages]
    if all(len(pipeline.stages) == 1 and pipeline.micro_batches == 1 for pipeline in plan.pipelines):
        if all(len(stage.devices) == 1 for stage in stages):
            return deduced.batch, (tuple(pipeline.share for pipeline in plan.pipelines),)
        if len(stages) == 1 and not stages[0].is_grid:
            layout = deduced.annotated.layouts[0]
            along = [axis for axis, each in zip(deduced.inside(layout), layout.axes, strict=True) if each.ways > 1]
            if len(along) == 1:
                return along[0], segments(stages[0])
    raise PlanError(
        f"plan {plan.summary()} is no program of all devices together; give rows to single devices, or one stage"
    )
