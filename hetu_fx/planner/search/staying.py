"""Candidates priced with getting there, for a job that runs already.

Going from the plan that runs to another one takes seconds once; the steps ahead take theirs each. So plans compete by

    seconds of a step + seconds of the move / steps ahead                                               (1)

among which the plan that runs has no move. A search need not know of it: (1) is worked out of what it has found, for
every plan that can be the best by it: a plan whose step alone takes longer than (1) of another is not.
"""

from __future__ import annotations

import math

from hetu_fx.planner.price.moving import moving_seconds
from hetu_fx.planner.price.step import memory_problems
from hetu_fx.planner.search.problem import Candidates, Problem, predict_by_costs
from hetu_fx.plans.plan import Plan


def with_moves(found: Candidates, problem: Problem, running: Plan) -> dict[Plan, float]:
    """Return the candidates, and the plan that runs if it fits, by (1); those that cannot be the best by less.

    Raises `PlanError` where nobody has what a device held that the plan that runs uses and the cluster lacks.
    """
    priced = _staying(running, problem)
    least = min(priced.values(), default=math.inf)
    for plan, seconds in sorted(found.items(), key=lambda pair: pair[1]):
        if plan not in priced:
            move = moving_seconds(running, plan, problem.costs, problem.cluster) if seconds < least else 0.0
            priced[plan] = seconds + move / problem.steps_ahead
            least = min(least, priced[plan])
    return priced


def _staying(running: Plan, problem: Problem) -> dict[Plan, float]:
    """Return the plan that runs with its seconds, if these devices can go on running it."""
    if not set(running.devices) <= set(problem.cluster.ranks):
        return {}
    prediction = predict_by_costs(running, problem)
    return {} if memory_problems(prediction, problem.cluster) else {running: prediction.seconds}
