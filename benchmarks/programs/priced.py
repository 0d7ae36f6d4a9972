"""What programs take by HAP's prices: as found, as they run, and what plans without a program take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.kit.report import Bar, Row
from benchmarks.programs.cases import Case
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import DeductionError, PlanError
from hetu_fx.planner.count.graph_problem import GraphProblem
from hetu_fx.planner.search.hap.assemble import HapResult
from hetu_fx.planner.search.hap.forms import SynthesisRules
from hetu_fx.planner.search.hap.priced import run_of
from hetu_fx.planner.search.hap.search import search
from hetu_fx.planner.search.hap.to_plan import translations
from hetu_fx.planner.search.hap.to_program import sayable, stage_of
from hetu_fx.plans.plan import Pipeline, Plan

BAR = 1.02


@dataclass(frozen=True)
class Priced:
    """A program as it was found, and as its plan runs."""

    found: HapResult
    plan: Plan
    runs: HapResult

    @property
    def ratio(self) -> float:
        """Return what runs by what was found."""
        return self.runs.seconds / self.found.seconds


def priced(problem: GraphProblem, cluster: Cluster, *, factors: bool) -> Priced:
    """Search for a program, with sufficient factors or without, and price what its plan runs."""
    found = search(sayable(problem), cluster, rules=SynthesisRules(sufficient_factors=factors))
    plan = Plan((Pipeline((stage_of(problem, found),)),))
    return Priced(found, plan, run_of(problem, plan, cluster))


def rows_of(case: Case) -> Iterator[Row]:
    """Yield a row with sufficient factors and one without."""
    problem = case.problem()
    by_rows = _seconds(problem, Plan.data_parallel(case.cluster.ranks, _shares(case.cluster)), case.cluster)
    for factors in (True, False):
        each = priced(problem, case.cluster, factors=factors)
        nearest = min(_nearest(problem, each.found, case.cluster), default=float("inf"))
        yield {
            "model": case.name,
            "devices": len(case.cluster.devices),
            "factors": factors,
            "program ms": 1e3 * each.found.seconds,
            "runs ms": 1e3 * each.runs.seconds,
            "runs / program": each.ratio,
            "regions": len(each.plan.pipelines[0].stages[0].program),
            "nearest ms": 1e3 * nearest,
            "nearest / runs": nearest / each.runs.seconds,
            "rows ms": 1e3 * by_rows,
            "rows / runs": by_rows / each.runs.seconds,
        }


def bars(rows: list[Row]) -> list[Bar]:
    """Return what every program that runs is held to."""
    ratios = ((_called(row), float(str(row["runs / program"]))) for row in rows)
    return [Bar(f"what runs by the program: {name}", ratio, BAR, at_least=False) for name, ratio in ratios]


def _called(row: Row) -> str:
    return f"{row['model']} on {row['devices']}{'' if row['factors'] else ', no factors'}"


def _nearest(problem: GraphProblem, found: HapResult, cluster: Cluster) -> Iterator[float]:
    """Yield what the plans without a program take that come nearest, as they run."""
    for each in translations(problem.program, found, cluster):
        yield _seconds(problem, each.plan, cluster)


def _seconds(problem: GraphProblem, plan: Plan, cluster: Cluster) -> float:
    try:
        return run_of(problem, plan, cluster).seconds
    except (PlanError, DeductionError):
        return float("inf")


def _shares(cluster: Cluster) -> tuple[int, ...]:
    """Return rows in proportion to speed."""
    least = min(device.speed for device in cluster.devices)
    return tuple(round(10 * device.speed / least) for device in cluster.devices)
