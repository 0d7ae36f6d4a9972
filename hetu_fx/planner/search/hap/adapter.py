"""The HAP search, as the table of searches knows it: plans that carry its program, and plans near it.

HAP plans op by op. A plan with a program says that op by op too (`to_program`); others say how all devices share rows,
or what one group of them splits. Those that come nearest are found by HAP's own prices, with their shares, and priced
once more by the cost of all searches, for what their groups split. What a plan with a program runs is taken from the
passes (`executed`), and its step is played on paper (`played`), as those of other plans are: HAP's prices know work and
exchanges alone, and not what a step takes besides. So a program that sends factors is asked for without them too, and
each with parameters in parts and on every device. What the program says and a plan cannot is noted on the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetu_fx.errors import DeductionError, PlanError, ResolveError
from hetu_fx.planner.price.step import memory_problems
from hetu_fx.planner.search.hap.assemble import HapResult
from hetu_fx.planner.search.hap.forms import SynthesisRules
from hetu_fx.planner.search.hap.search import MOST_ROUNDS, search
from hetu_fx.planner.search.hap.to_plan import PARTS, Translation, one_group, translations
from hetu_fx.planner.search.hap.to_program import sayable, stage_of
from hetu_fx.planner.search.problem import Candidates, Captured, Problem
from hetu_fx.plans.plan import Pipeline, Plan
from hetu_fx.plans.prediction import Prediction


def find_plans(problem: Problem) -> Candidates:
    """Return the plan that carries HAP's program, and plans near it, that fit; none if it finds none, and says why."""
    captured = problem.captured
    assert captured is not None, "the table refuses problems without a graph"
    try:
        result = _searched(captured, problem)
        found = list(_translations(captured, result, problem))
    except PlanError as refusal:
        problem.tell(f"hap: {refusal}")
        return {}
    plans = [plan for each in found for plan in _plans(each, captured, problem)]
    near = dict(fitted for fitted in map(problem.fitted, plans) if fitted is not None)
    return near | dict(_with_programs(captured, result, problem))


def find_programs(problem: Problem) -> Candidates:
    """Return the plans that carry HAP's program alone, found in one round; none if it finds none, and says why."""
    captured = problem.captured
    assert captured is not None, "the table refuses problems without a graph"
    try:
        return dict(_with_programs(captured, _searched(captured, problem, rounds=1), problem, rounds=1))
    except PlanError as refusal:
        problem.tell(f"hap: {refusal}")
        return {}


def _searched(captured: Captured, problem: Problem, *, factors: bool = True, rounds: int = MOST_ROUNDS) -> HapResult:
    """Return HAP's program, of what can be said."""
    options, program = problem.options, sayable(captured.hap)
    return search(
        program,
        problem.cluster,
        rules=SynthesisRules(sufficient_factors=factors),
        memory_fraction=options.memory_fraction,
        zero=options.zero,
        rounds=rounds,
    )


def _with_programs(
    captured: Captured, result: HapResult, problem: Problem, *, rounds: int = MOST_ROUNDS
) -> Iterator[tuple[Plan, float]]:
    """Yield the plans that carry a program, with their seconds, if the passes run them and they fit.

    Of a program with its parameters in parts, and on every device, the faster one.
    """
    if not problem.options.tensor_parallel or "program" in problem.options.off:
        return
    sends = any(step.form.gathered for step in result.program.steps)
    for each in (result, *([_searched(captured, problem, factors=False, rounds=rounds)] if sends else [])):
        try:
            stage = stage_of(captured.hap, each)
        except PlanError as refusal:
            problem.tell(f"hap: its program cannot be said: {refusal}")
            continue
        whole = problem.plan([Pipeline((stage,))])
        plans = (replace(whole, zero=zero) for zero in range(problem.options.zero, -1, -1))
        priced = [found for plan in plans for found in _with_program(plan, captured, each, problem)]
        yield from sorted(priced, key=lambda found: found[1])[:1]


def _with_program(plan: Plan, captured: Captured, result: HapResult, problem: Problem) -> Iterator[tuple[Plan, float]]:
    try:
        expected = captured.expect(plan, problem.cluster)
    except (PlanError, DeductionError, ResolveError) as refusal:
        problem.tell(f"hap: its program does not run: {refusal}")
        return
    if problem.options.refused(plan) or memory_problems(expected, problem.cluster, problem.options.memory_fraction):
        return
    problem.priced.add(expected.seconds, is_roomy=True)
    yield replace(plan, predicted=Prediction(expected.seconds, why=_said(result))), expected.seconds


def _said(result: HapResult) -> str:
    return f"hap, by its own prices: the program that was found takes {result.seconds:.4g} s: {result.why}"


def _translations(captured: Captured, result: HapResult, problem: Problem) -> Iterator[Translation]:
    options = problem.options
    near = translations(
        captured.hap.program, result, problem.cluster, memory_fraction=options.memory_fraction, zero=options.zero
    )
    yield from (each for each in near if options.sequence_parallel or not each.plan.sequence_parallel)


def _plans(found: Translation, captured: Captured, problem: Problem) -> Iterator[Plan]:
    """Yield the plan that was found, as the runtime has it: with whole parts of what is split, if there are enough."""
    plan, options = found.plan, problem.options
    if len(plan.pipelines) > 1 or len(plan.devices) == 1:
        yield _noted(plan, found, problem)
    elif options.tensor_parallel:
        costs = captured.costs_of(plan.split) if plan.split else problem.costs
        split = plan.split if costs != problem.costs else ()
        pipelines = one_group(found.result, min(PARTS, costs.units))
        if len(pipelines[0].devices) > 1:
            yield _noted(replace(plan, pipelines=pipelines, split=split), found, problem)


def _noted(plan: Plan, found: Translation, problem: Problem) -> Plan:
    note = Prediction(found.seconds, why=f"hap, by its own prices: {found.why}")
    return replace(plan, name=problem.options.name, max_length=problem.options.max_length, predicted=note)
