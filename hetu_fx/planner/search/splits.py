"""What groups may split besides what they would: the experts of a mixture.

By themselves groups split what spreads most work for least communication, inside of experts their width. Whole experts
can be spread instead, which moves as much, leaves rows uncut, and has other parts: more where there are many narrow
experts, so that unlike devices end together. A search is asked again for what the program costs then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hetu_fx.planner.search.problem import Candidates, Problem
from hetu_fx.plans.plan import Plan

Find = Callable[[Problem], Candidates]


def in_all_splits(find: Find) -> Find:
    """Return a search that finds plans for each way to split a captured program."""

    def found_in_all(problem: Problem) -> Candidates:
        found = dict(find(problem))
        captured = problem.captured
        if captured is None or not problem.options.tensor_parallel or "experts" in problem.options.off:
            return found
        for split in captured.splits:
            if problem.time_limit.ends(found):
                break
            profile = replace(problem.profile, costs=captured.costs_of(split))
            plans = find(replace(problem, profile=profile, captured=None))
            found |= {replace(plan, split=split): seconds for plan, seconds in plans.items() if _has_groups(plan)}
        return found

    return found_in_all


def _has_groups(plan: Plan) -> bool:
    return any(len(stage.devices) > stage.context for *_, stage in plan.stages)
