"""Replicas that share what they read: gradients go home as they come, parameters are gathered unit by unit (zero 2, 3).

That costs time, and saves memory. So it is asked for where a plan of one stage and one micro-batch does not fit memory
otherwise, or not without recomputing: more of `zero` only where less of it does so, too (Rajbhandari et al., ZeRO, SC
2020, section 5; Zhao et al., PyTorch FSDP, VLDB 2023). Replicas are groups of equal size, with rows by their speed, or
equal ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hetu_fx.planner.search.homogeneous import orders
from hetu_fx.planner.search.problem import Candidates, Problem, Search, in_all_splits
from hetu_fx.plans.homes import largest_remainder
from hetu_fx.plans.plan import ZERO, Pipeline, Plan, Stage


def _find(problem: Problem) -> Candidates:
    problem.tell("sharded: replicas that share gradients and parameters")
    found = dict[Plan, float]()
    for plan in dict.fromkeys(_replicas(problem)):
        for zero in (zero for zero in ZERO if zero):
            asked = replace(plan, zero=zero)
            priced = problem.fit_memory(asked) if asked.zero_in_effect == zero else None
            if priced is not None:
                found |= [priced] if zero > 1 else []
                if not priced[0].recomputes:
                    break
    return found


def _replicas(problem: Problem) -> Iterator[Plan]:
    """Yield plans of replicas of one stage over all devices."""
    cluster, costs, options = problem.cluster, problem.costs, problem.options
    count = len(cluster.devices)
    for size, order in itertools.product(costs.group_sizes(count if options.tensor_parallel else 1), orders(cluster)):
        groups = [order[start : start + size] for start in range(0, count - size + 1, size)]
        speeds = [sum(cluster.device(rank).speed for rank in group) for group in groups]
        for shares in (largest_remainder(costs.rows, speeds), [1] * len(groups)):
            if min(shares) and sum(shares) <= costs.rows:
                pairs = zip(groups, shares, strict=True)
                yield problem.plan(Pipeline((Stage(group),), share=share) for group, share in pairs)


SHARDED = Search(
    name="sharded",
    applies="replicas that do not fit memory with whole gradients and parameters: zero 2 and 3, rows by speed",
    lacks=lambda problem: "" if problem.options.zero else "plans keep states whole (zero 0)",
    find=in_all_splits(_find),
)
