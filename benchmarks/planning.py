"""Seconds that planning takes, and how good its plans are, for 8 to 4,096 devices.

`auto` is asked about the clusters of `planning_cases`: the published ones of H20 and H800 (Hetu v2), Malleus'
situations, and clusters of one, two and four kinds. Its plan is compared with the best homogeneous plan, with the
published plan where there is one, and, for three devices, with the best of all plans; all are priced by the planner's
own cost model. Seconds are those of the processor, which depend less on what else runs. Each question is asked twice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from benchmarks.exhaustive_plans import all_plans
from benchmarks.planning_cases import Case, cases, llama
from benchmarks.report import Bar, Row, finish, parser
from hetu_fx.planner.cost import predict
from hetu_fx.planner.make_plan import make_plan, make_plans
from hetu_fx.planner.program import ProgramCosts
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.table import find_search
from hetu_fx.planner.space import PlanOptions
from hetu_fx.plans import Plan
from hetu_fx.topology import Cluster, Link

QUICK_DEVICES = 8
TWICE_DEVICES = 16  # larger questions are asked once
STRAGGLER_BARS = {"7B, 64 A800, 3 straggle": 2.0, "7B, 1024 A800, 3 straggle": 60.0}  # seconds of the Malleus search


def main() -> int:
    """Measure and judge."""
    options = parser("planning", "Seconds and quality of plans for 8 to 4,096 devices.").parse_args()
    chosen = list(cases(QUICK_DEVICES if options.quick else 4096))
    rows = [measure(case) for case in chosen]
    bars = [
        Bar(
            "slowest plan over the best homogeneous one", max(_number(r, "over homogeneous") for r in rows), 1.01, False
        ),
        Bar("questions with two answers", sum(row["same"] == "no" for row in rows), 0, False),
        Bar("slowest plan over the best of all, 3 devices", max(over_the_best_of_all()), 1.02, False),
        *(
            Bar(f"seconds of malleus: {case.name}", seconds_of("malleus", case), STRAGGLER_BARS[case.name], False)
            for case in chosen
            if case.name in STRAGGLER_BARS
        ),
    ]
    return finish("planning", bars, rows)


def measure(case: Case) -> Row:
    """Plan, and price what it is compared with."""
    problem = Problem(case.profile, case.cluster)
    start = time.process_time()
    (plan,) = make_plans(problem)
    seconds = time.process_time() - start
    is_small = len(case.cluster.devices) <= TWICE_DEVICES
    same = ("yes" if make_plans(problem) == (plan,) else "no") if is_small else "not asked"
    step = _step(plan)
    even = min(find_search("homogeneous").find(problem).values())
    published = case.published_plan
    priced = "" if published is None else predict(published, problem.costs, problem.cluster).seconds
    return {
        "case": case.name,
        "plan seconds": seconds,
        "step": step,
        "homogeneous": even,
        "over homogeneous": step / even,
        "published": priced,
        "same": same,
        "pipelines": len(plan.pipelines),
        "stages": max(len(pipeline.stages) for pipeline in plan.pipelines),
    }


def seconds_of(search: str, case: Case) -> float:
    """Return the processor's seconds of one search."""
    start = time.process_time()
    find_search(search).find(Problem(case.profile, case.cluster))
    return time.process_time() - start


def over_the_best_of_all() -> Iterator[float]:
    """Yield how much slower plans for three devices are than the best of all plans."""
    counts = (1, 4)
    whole = llama(3, 1024, 2816, rows=5, units=2).costs
    costs = ProgramCosts(5, whole.before, whole.blocks, whole.after, whole.boundary_bytes, units=2)
    for speeds in ((4.0, 1.0), (3.0, 2.0, 2.0), (4.0, 2.0, 1.0)):
        cluster = Cluster.on_paper([1e12 * speed for speed in speeds], intra=Link(1e10, 1e-6))
        best = min(predict(plan, costs, cluster).seconds for plan in all_plans(costs, cluster, counts))
        found = make_plan(costs, cluster, options=PlanOptions(micro_batches=counts))
        yield _step(found) / best


def _step(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.seconds


def _number(row: Row, key: str) -> float:
    return float(str(row[key]))


if __name__ == "__main__":
    sys.exit(main())
