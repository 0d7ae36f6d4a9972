"""The search over runs of devices in a few orders, as the table of searches knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetu_fx.planner.contiguous import search
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.plans.plan import Plan

MOST_DEVICES = 16
"""Runs of more devices are too many to go through."""

MOST_SHARING = 16
"""Of the plans found, so many of the fastest with groups are also priced with the sequence shared."""


def _find(problem: Problem) -> Candidates:
    """Return the plans found with their seconds; where groups may share the sequence, also as they do."""
    found = search(problem.costs, problem.cluster, problem.options, problem.tell)
    if not (problem.options.sequence_parallel and problem.options.tensor_parallel and problem.costs.has_sequence):
        return found
    return found | (_sharing(found, problem) if found else _fitting(problem))


def _sharing(found: Mapping[Plan, float], problem: Problem) -> dict[Plan, float]:
    """Return the best of the plans found whose groups can share the sequence, sharing it."""
    grouped = sorted(filter(_has_groups, found), key=lambda plan: (found[plan], plan.summary()))
    plans = (replace(plan, sequence_parallel=True) for plan in grouped[:MOST_SHARING])
    return {plan: predict(plan, problem.costs, problem.cluster).seconds for plan in plans}


def _fitting(problem: Problem) -> dict[Plan, float]:
    """Return the plans that fit memory as their groups share the sequence."""
    found = search(problem.costs.in_sequence, problem.cluster, problem.options, problem.tell)
    return {replace(plan, sequence_parallel=True): seconds for plan, seconds in found.items() if _has_groups(plan)}


def _has_groups(plan: Plan) -> bool:
    return any(len(stage.devices) > 1 for *_, stage in plan.stages)


def _lacks(problem: Problem) -> str:
    count = len(problem.cluster.devices)
    if count <= MOST_DEVICES:
        return ""
    return f"it goes through all runs of up to {MOST_DEVICES} devices, but there are {count}; use 'auto' or 'classes'"


CONTIGUOUS = Search(
    name="contiguous",
    applies=f"up to {MOST_DEVICES} devices: groups and stages of any size, side by side in order of speed or node",
    lacks=_lacks,
    find=_find,
)
