"""The HAP search, as the table of searches knows it: what its program says that a plan can say, by the one cost.

HAP plans op by op (`planner.hap`); a plan says how all devices share rows, or what one group of them splits. The plans
that come nearest to HAP's program are found by its own prices, with their shares, and priced once more by the cost
of all searches, for what their groups split. What the program says and the plan cannot is noted on the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.rounding import rounded
from hetu_fx.planner.search.hap.search import search
from hetu_fx.planner.search.hap.to_plan import PARTS, Translation, translations
from hetu_fx.planner.search.problem import Candidates, Captured, Problem, Search
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import Prediction


def _find(problem: Problem) -> Candidates:
    """Return the plans near HAP's program that fit; none if it finds none, and says why."""
    captured = problem.captured
    assert captured is not None, "the table refuses problems without a graph"
    try:
        found = list(_translations(captured, problem))
    except PlanError as refusal:
        problem.tell(f"hap: {refusal}")
        return {}
    plans = [plan for each in found for plan in _plans(each, captured, problem)]
    return dict(fitted for fitted in map(problem.fitted, plans) if fitted is not None)


def _translations(captured: Captured, problem: Problem) -> Iterator[Translation]:
    options, cluster = problem.options, problem.cluster
    fraction = options.memory_fraction
    result = search(captured.hap, cluster, memory_fraction=fraction, zero=options.zero)
    near = translations(captured.hap, result, cluster, memory_fraction=fraction, zero=options.zero)
    yield from (each for each in near if options.sequence_parallel or not each.plan.sequence_parallel)


def _plans(found: Translation, captured: Captured, problem: Problem) -> Iterator[Plan]:
    """Yield the plan that was found, as the runtime has it: with whole parts of what is split, if there are enough."""
    plan, options = found.plan, problem.options
    if not plan.split:
        yield _noted(plan, found, problem)
    elif options.tensor_parallel:
        costs = captured.costs_of(plan.split)
        split = plan.split if costs != problem.costs else ()
        pipelines = _in_units(found, costs)
        if pipelines:
            yield _noted(replace(plan, pipelines=pipelines, split=split), found, problem)


def _in_units(found: Translation, costs: ProgramCosts) -> tuple[Pipeline, ...]:
    """Return one group with shares of whole parts; nothing where that leaves no group."""
    result = found.result
    shares = rounded(result.ratios[0], min(PARTS, costs.units))
    kept = [(rank, share) for rank, share in zip(result.ranks, shares, strict=True) if share]
    if len(kept) < 2:
        return ()
    return (Pipeline((Stage(tuple(rank for rank, _ in kept), tuple(share for _, share in kept)),)),)


def _noted(plan: Plan, found: Translation, problem: Problem) -> Plan:
    note = Prediction(found.seconds, why=f"hap, by its own prices: {found.why}")
    return replace(plan, name=problem.options.name, max_length=problem.options.max_length, predicted=note)


def _lacks(problem: Problem) -> str:
    if problem.captured is not None:
        return ""
    return (
        "it plans op by op and needs the captured graph, which profiles do not hold; use hetu_fx.plan(model, batch, "
        "search='hap'), or 'auto', 'homogeneous', 'classes' or 'contiguous' for a profile"
    )


HAP = Search(
    name="hap",
    applies="captured models, any: rows or parts of the widths that pay, op by op, in proportion to unlike devices",
    lacks=_lacks,
    find=_find,
)
