import itertools
import math
from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.price.step import memory_problems
from hetu_fx.planner.search.cluster_regions import CLASSES, cuts, estimate_templates
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.templates import TemplateRegion, Templates, device_classes
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=12, rows=48, length=256, width=512)
NODES = "".join(8 * letter for letter in "abcdefgh")


def of(*speeds: float, memory_bytes: int = 1 << 40) -> Cluster:
    return paper(*speeds, nodes=NODES[: len(speeds)], inter=Link(1e9, 1e-5), memory_bytes=memory_bytes)


def test_classes_in_order_are_cut_in_regions_some_of_which_are_left_out() -> None:
    found = set(cuts((0, 1)))
    assert found == {((0,), (1,)), ((0,),), ((1,),), ((0, 1),), ()}


def test_slow_devices_are_used_only_where_that_is_faster() -> None:
    cluster = of(*[1000] * 16, *[300] * 16)
    plan = make_plan(COSTS, cluster, search="classes")
    assert plan.predicted is not None
    assert plan.predicted.seconds == expect(plan, COSTS, cluster).seconds
    alone = make_plan(COSTS, of(*[1000] * 16), search="classes")
    assert alone.predicted is not None
    assert plan.predicted.seconds <= alone.predicted.seconds  # the slow ones may be left out
    plan.check(num_blocks=12, world_size=32)


def test_blocks_go_where_there_is_memory() -> None:
    cluster = of(*[1000] * 8, *[300] * 8, memory_bytes=int(2.5 * COSTS.whole.parameter_bytes))
    plan = make_plan(COSTS, cluster, search="classes")
    assert plan.predicted is not None
    assert not memory_problems(plan.predicted, cluster, 0.9)
    assert all(len(pipeline.devices) > 1 for pipeline in plan.pipelines)


def test_blocks_that_differ_are_cut_where_it_is_even() -> None:
    heavy = transformer(layers=1, width=512, length=768).blocks[0]
    blocks = (heavy, *COSTS.blocks[1:])
    costs = ProgramCosts(48, COSTS.before, blocks, COSTS.after, COSTS.boundary_bytes, COSTS.units)
    found = CLASSES.find(Problem(Profile(costs), of(*[1000] * 4)))
    piped = [plan for plan in found if len(plan.pipelines[0].stages) == 2]
    assert piped
    assert all((plan.pipelines[0].stages[0].blocks or 0) < 6 for plan in piped)


def test_the_fastest_templates_are_those_of_all_deals_wherever_they_stand() -> None:
    problem = Problem(Profile(COSTS), of(*[1000] * 8, *[300] * 8))
    templates = Templates(problem)
    for region, zero, is_alone in itertools.product(((0,), (1,), (0, 1)), (0, 1), (False, True)):
        rows, estimates = templates.rows_of(region), templates.estimates
        every = dict[object, float]()
        for deal in templates._all(region, rows):
            family = estimates.family(deal.pipeline(0), deal.count, deal.rows(rows))
            if family is not None:
                made = deal.template(family, estimates, zero, is_alone=is_alone)
                seconds = made.step_seconds(rows)
                every[made.kind(estimates)] = min(seconds, every.get(made.kind(estimates), math.inf))
        found = [one.step_seconds(rows) for one in templates.best(TemplateRegion(region, zero, is_alone), 6)]
        assert found == sorted(every.values())[:6]
        fewer = templates.best(TemplateRegion(region, zero, is_alone), 6, below=found[2])
        assert [one.step_seconds(rows) for one in fewer] == [seconds for seconds in found if seconds < found[2]]


def test_states_stay_whole_where_parameters_take_long_to_gather() -> None:
    problem = Problem(Profile(COSTS), replace(of(*[1000] * 8, *[300] * 8), inter=Link(2e7, 1e-5)))
    spread, whole = (
        min((one for one in estimate_templates(problem) if one.zero == zero), key=lambda one: one.seconds)
        for zero in (1, 0)
    )
    assert whole.seconds < spread.seconds
    plan = make_plan(COSTS, problem.cluster, search="classes")
    kept = make_plan(COSTS, problem.cluster, search="classes", options=PlanOptions(forbidden=("whole_states",)))
    assert plan.zero == 0
    assert kept.zero == 1
    assert plan.predicted is not None
    assert kept.predicted is not None
    assert plan.predicted.seconds < kept.predicted.seconds


def test_too_many_classes_are_refused() -> None:
    cluster = paper(*range(1, 9))
    assert len(device_classes(Problem(Profile(COSTS), cluster))) == 8
    with pytest.raises(PlanError, match="it plans for up to 6 classes"):
        make_plan(COSTS, cluster, search="classes")
