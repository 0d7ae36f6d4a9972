"""The cases that planning is measured on are questions that can be asked."""

from benchmarks.cases.planning import cases
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.templates import device_classes
from hetu_fx.plans.plan import pipeline_rows


def test_the_published_plans_fit_their_models_and_clusters() -> None:
    published = [case for case in cases(most=48) if case.published]
    assert len(published) == 14
    for case in published:
        plan, costs = case.published_plan, case.profile.costs
        assert plan is not None
        plan.check(num_blocks=costs.num_blocks, world_size=len(case.cluster.devices))
        assert sum(pipeline_rows(costs.rows, plan)) == costs.rows


def test_the_cases_have_one_two_and_four_kinds_and_stragglers() -> None:
    found = {len(device_classes(Problem(case.profile, case.cluster))) for case in cases(most=64)}
    assert {1, 2, 4} <= found
