"""Plan the demo's two variants: one for usual batches, one for batches of long sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.demo.data import Batch
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.make_plan import PlanOptions, make_plan
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Programs


@dataclass(frozen=True, slots=True)
class Wanted:
    """A variant to plan: for batches like this global one; `max_length` None takes any length."""

    name: str
    batch: Batch
    max_length: int | None = None


def plan_variants(
    model: nn.Module, cluster: Cluster, wanted: Sequence[Wanted]
) -> tuple[list[Plan], list[ProgramCosts]]:
    """Plan every variant for the measured cluster; collective. Only rank 0 has the costs.

    Rank 0 plans and tells the others: planning is deterministic, but slow devices would take long.
    """
    plans: list[Plan] = []
    costs: list[ProgramCosts] = []
    if dist.get_rank() == 0:
        costs = [_costs(model, variant.batch) for variant in wanted]
        pairs = zip(costs, wanted, strict=True)
        plans = [make_plan(cost, cluster, options=_options(variant)) for cost, variant in pairs]
    told = [plans]
    dist.broadcast_object_list(told, src=0)
    return told[0], costs


def _costs(model: nn.Module, batch: Batch) -> ProgramCosts:
    program = Programs(model, None).first(batch, training=True)
    rows = next(iter(batch.values())).shape[0]
    return program_costs(program, rows=rows)


def _options(wanted: Wanted) -> PlanOptions:
    return PlanOptions(name=wanted.name, max_length=wanted.max_length)
