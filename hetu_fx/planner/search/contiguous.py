"""The search over runs of devices in a few orders, as the table of searches knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetu_fx.planner.contiguous import search
from hetu_fx.planner.cost import predict
from hetu_fx.planner.program import ProgramCosts
from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.plans import Plan

MOST_SHARING = 16
"""Of the plans found, so many of the fastest with groups are also priced with the sequence shared."""


def _find(problem: Problem) -> Candidates:
    """Return the plans found with their seconds; where none fits, with smaller micro-batches or a shared sequence."""
    options = problem.options
    found = _search(problem, problem.costs)
    if not (options.sequence_parallel and options.tensor_parallel and problem.costs.has_sequence):
        return found
    if found:
        return found | _sharing(found, problem)
    found = _search(problem.thinner, problem.costs)
    return found | _fitting(problem if found else problem.thinner)


def _search(problem: Problem, costs: ProgramCosts) -> dict[Plan, float]:
    return search(costs, problem.cluster, problem.options, problem.tell)


def _sharing(found: Mapping[Plan, float], problem: Problem) -> dict[Plan, float]:
    """Return the best of the plans found whose groups can share the sequence, sharing it."""
    grouped = sorted(filter(_has_groups, found), key=lambda plan: (found[plan], plan.summary()))
    plans = (replace(plan, sequence_parallel=True) for plan in grouped[:MOST_SHARING])
    return {plan: predict(plan, problem.costs, problem.cluster).seconds for plan in plans}


def _fitting(problem: Problem) -> dict[Plan, float]:
    """Return the plans that fit memory as their groups share the sequence."""
    found = _search(problem, problem.costs.in_sequence)
    return {replace(plan, sequence_parallel=True): seconds for plan, seconds in found.items() if _has_groups(plan)}


def _has_groups(plan: Plan) -> bool:
    return any(len(stage.devices) > 1 for *_, stage in plan.stages)


CONTIGUOUS = Search(
    name="homogeneous+contiguous",
    applies="always: equal devices, and unequal ones whose groups stand side by side in order of speed or node",
    lacks=lambda problem: "",
    find=_find,
)
