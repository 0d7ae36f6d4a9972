"""What is lost by taking the plan of `auto`: its simulated step over the best of many others of the same question.

The others are the best by estimate of all equal pipelines and of all pipelines by classes of devices, priced and made
to fit memory as searches do it, and plans drawn at random that fit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.cases.any_plans import draw_plan
from benchmarks.cases.planning import cluster, small
from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.search.homogeneous import candidates
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.regions import estimated
from hetu_fx.planner.simulate.simulate import simulated_seconds
from hetu_fx.plans.plan import Plan

KINDS = (("A100-80G",), ("A100-80G", "V100-32G"), ("V100-32G", "H20-96G", "A100-80G", "H800-80G"))
GBITS = (10, 100, 400)
DEVICES = (8, 16, 32, 64, 128, 256)
DRAWS = 2000  # at most, for the plans that fit
FAR = (
    2.0  # times the least price: plans of more are not simulated; simulations were seen to be up to 1.7 times the price
)


@dataclass(frozen=True)
class Question:
    """So many devices of some kinds, nodes of which are joined by a link."""

    devices: int
    kinds: tuple[str, ...]
    gbits: int

    @property
    def name(self) -> str:
        """Return it in words."""
        return f"7B, {self.devices} of {len(self.kinds)} kinds, {self.gbits} Gbit/s"

    @property
    def problem(self) -> Problem:
        """Return it as planners are asked."""
        each = self.devices // len(self.kinds)
        found = cluster(dict.fromkeys(self.kinds, each), per_node=min(8, each))
        link = Link(self.gbits * 1.25e8, found.inter.latency_seconds)
        return Problem(small(max(64, self.devices)), replace(found, inter=link))


def questions(most: int) -> Iterator[Question]:
    """Yield those of up to so many devices."""
    for devices, kinds, gbits in itertools.product(DEVICES, KINDS, GBITS):
        if devices <= most:
            yield Question(devices, kinds, gbits)


def regret(question: Question, count: int = 200) -> tuple[float, int]:
    """Return auto's simulated seconds over the least of `count` best-priced and `count` drawn plans, and how many."""
    problem = question.problem
    costs, cluster_ = problem.costs, problem.cluster
    others = best_priced(problem, count) | drawn_plans(problem, count)
    near = (plan for plan, seconds in others.items() if seconds <= FAR * min(others.values()))
    best = min((simulated_seconds(plan, costs, cluster_) for plan in near), default=float("inf"))
    mine = make_plan(problem.profile, cluster_)
    return simulated_seconds(mine, costs, cluster_) / best, len(others)


def best_priced(problem: Problem, count: int) -> dict[Plan, float]:
    """Return so many plans that fit, the first by estimate, and then by the closed form, with its seconds."""
    found = sorted([*candidates(problem), *estimated(problem)], key=lambda one: one.seconds)
    plans = dict.fromkeys(one.plan(problem) for one in found[: 4 * count])
    fitting = [pair for pair in map(problem.fitted, plans) if pair is not None]
    return dict(sorted(fitting, key=lambda pair: pair[1])[:count])


def drawn_plans(problem: Problem, count: int) -> dict[Plan, float]:
    """Return so many plans drawn at random that fit, or all that a number of draws finds, with their seconds."""
    rng, found = random.Random(0), dict[Plan, float]()
    for _ in range(DRAWS):
        if len(found) == count:
            break
        fitted = problem.fitted(draw_plan(problem.cluster, problem.costs, rng))
        if fitted is not None:
            found |= [fitted]
    return found
