"""What programs take by HAP's prices: as found, as they run, and what plans without a program take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.kit.report import Bar, Row
from benchmarks.programs.cases import Case
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import DeductionError, PlanError
from hetu_fx.planner.count.graph_problem import GraphProblem
from hetu_fx.planner.search.hap.adapter import hap_stage, is_expressible, translations
from hetu_fx.planner.search.hap.op_forms import SynthesisRules
from hetu_fx.planner.search.hap.priced import deduce_plan, price_plan_run
from hetu_fx.planner.search.hap.search import search
from hetu_fx.planner.search.hap.synthesised_program import HapResult
from hetu_fx.plans.plan import Pipeline, Plan

BAR = 1.02


@dataclass(frozen=True)
class Found:
    """A program as it was found, and the plan that carries it."""

    found: HapResult
    plan: Plan


def found_program(problem: GraphProblem, cluster: Cluster, *, factors: bool) -> Found:
    """Search for a program, with sufficient factors or without."""
    found = search(is_expressible(problem), cluster, rules=SynthesisRules(sufficient_factors=factors))
    return Found(found, Plan((Pipeline((hap_stage(problem, found),)),)))


def rows_of(case: Case) -> Iterator[Row]:
    """Yield a row with sufficient factors and one without."""
    problem, cluster = case.subject.problem(), case.cluster
    by_rows = run_seconds(problem, by_speed(cluster), cluster)
    for factors in (True, False):
        each = found_program(problem, cluster, factors=factors)
        runs = price_plan_run(problem, each.plan, deduce_plan(problem, each.plan, cluster), cluster).seconds
        near = best_near(problem, each.found, cluster)
        nearest = float("inf") if near is None else run_seconds(problem, near, cluster)
        regions = each.plan.pipelines[0].stages[0].program
        yield {
            "model": case.subject.name,
            "devices": len(cluster.devices),
            "factors": factors,
            "program ms": 1e3 * each.found.seconds,
            "runs ms": 1e3 * runs,
            "runs / program": runs / each.found.seconds,
            "regions": len(regions),
            "sending factors": sum(region.factors for region in regions),
            "nearest ms": 1e3 * nearest,
            "nearest / runs": nearest / runs,
            "rows ms": 1e3 * by_rows,
            "rows / runs": by_rows / runs,
        }


def bars(rows: list[Row]) -> list[Bar]:
    """Return what every program that runs is held to."""
    ratios = ((_called(row), float(str(row["runs / program"]))) for row in rows)
    return [Bar(f"what runs by the program: {name}", ratio, BAR, at_least=False) for name, ratio in ratios]


def _called(row: Row) -> str:
    return f"{row['model']} on {row['devices']}{'' if row['factors'] else ', no factors'}"


def best_near(problem: GraphProblem, found: HapResult, cluster: Cluster) -> Plan | None:
    """Return the fastest of the plans without a program that come nearest, as they run."""
    plans = [each.plan for each in translations(problem.program, found, cluster)]
    return min(plans, key=lambda plan: run_seconds(problem, plan, cluster), default=None)


def run_seconds(problem: GraphProblem, plan: Plan, cluster: Cluster) -> float:
    """Return what a plan takes as it runs; infinite where it is no program of all devices, or cannot run."""
    try:
        return price_plan_run(problem, plan, deduce_plan(problem, plan, cluster), cluster).seconds
    except (PlanError, DeductionError):
        return float("inf")


def by_speed(cluster: Cluster) -> Plan:
    """Return the plan that gives each device rows in proportion to its speed."""
    least = min(device.speed for device in cluster.devices)
    return Plan.data_parallel(cluster.ranks, [round(10 * device.speed / least) for device in cluster.devices])
