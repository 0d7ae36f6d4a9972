import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.cases.published_malleus import LLAMA_32B, LLAMA_70B, Published, nodes_of
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plan, make_plans
from hetu_fx.planner.price.step import memory_problems
from hetu_fx.planner.search.malleus.adapter import Shape, degrees, layer_seconds, situation
from hetu_fx.planner.search.malleus.search import search
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import BlockTime, Profile, Slowdown
from hetu_fx.planner.values.program import ProgramCosts
from tests.planner.examples import paper, transformer

MODEL = Profile(transformer(layers=16, rows=64, length=512, width=512, units=4), tokens_per_row=512)
NODES = "aaaabbbb"
SLOW_LINK = Link(1e8, 1e-4)


def eight(rates: dict[int, float], memory_bytes: int = 1 << 40) -> Cluster:
    return paper(*[1000] * 8, memory_bytes=memory_bytes, nodes=NODES, inter=SLOW_LINK).with_rates(rates)


def test_the_plan_is_one_of_ours_priced_by_the_cost_of_all_searches() -> None:
    cluster = eight({0: 2.6})
    plan = make_plan(MODEL, cluster, search="malleus")
    plan.check(num_blocks=16, world_size=8)
    assert plan.predicted is not None
    assert plan.predicted.seconds == expect(plan, MODEL.costs, cluster).seconds
    assert {device.limit_bytes for device in plan.predicted.devices} == {1 << 40}


def test_a_straggler_gets_less_than_in_the_plan_for_healthy_devices() -> None:
    slow = eight({0: 2.6})
    healthy = make_plan(MODEL, eight({}), search="malleus")
    aware = make_plan(MODEL, slow, search="malleus")
    assert aware.predicted is not None
    assert aware.predicted.seconds < 0.75 * expect(healthy, MODEL.costs, slow).seconds
    assert healthy.predicted is not None
    assert aware.predicted.seconds >= healthy.predicted.seconds * (1 - 1e-9)


def test_a_hopeless_device_stands_by() -> None:
    assert 3 not in make_plan(MODEL, eight({3: 500.0}), search="malleus").devices


def test_plans_keep_within_memory() -> None:
    cluster = eight({0: 2.0}, memory_bytes=int(3 * MODEL.costs.whole.parameter_bytes))
    plan = make_plan(MODEL, cluster, search="malleus")
    assert plan.predicted is not None
    assert not memory_problems(plan.predicted, cluster, 0.9)
    assert all(len(pipeline.devices) > 1 for pipeline in plan.pipelines)


def test_what_fits_nowhere_is_said() -> None:
    with pytest.raises(PlanError, match="no plan fits the memory"):
        make_plan(MODEL, eight({}, memory_bytes=1000), search="malleus")


def test_groups_divide_what_can_be_cut_and_stay_in_a_node() -> None:
    def of(units: int, nodes: str, **options: bool) -> tuple[int, ...]:
        profile = replace(MODEL, costs=replace(MODEL.costs, units=units))
        return degrees(Problem(profile, paper(*[1] * len(nodes), nodes=nodes), PlanOptions(**options)))

    assert of(4, "aaaabbbb") == (1, 2, 4)
    assert of(6, "aaaabbbb") == (1, 2)
    assert of(8, "aab") == (1, 2)
    assert of(4, "aaaa", tensor_parallel=False) == (1,)


def test_seconds_of_a_layer_are_measured_or_told_or_else_counted() -> None:
    problem = Problem(MODEL, eight({0: 2.0}))
    counted = {size: layer_seconds(problem, size, 2) for size in (1, 2)}
    assert counted[2] < counted[1]
    told = replace(MODEL, alpha=(Slowdown("paper", {2: 1.0, 1: 1.8}),))
    assert layer_seconds(replace(problem, profile=told), 1, 2) == 1.8
    time = BlockTime("paper", 1, a=1e-9, b=1e-6, c=1e-3)
    seen = replace(told, times=(time,))
    assert layer_seconds(replace(problem, profile=seen), 1, 3) == pytest.approx(3 * (1e-9 * 512**2 + 1e-6 * 512) + 1e-3)
    assert layer_seconds(replace(problem, profile=seen), 2, 3) == math.inf  # alpha has other units
    assert situation(replace(problem, profile=seen), Shape(2, 4, 8)).degrees == (1,)


@pytest.mark.parametrize(("model", "rate", "seconds"), [(LLAMA_70B, 12.53, 656), (LLAMA_32B, 4.79, 255)])
def test_plans_as_good_as_the_published_are_reached_through_a_profile_file(
    model: Published, rate: float, seconds: float
) -> None:
    degree = max(model.layer_seconds)
    costs = transformer(layers=model.layers, rows=64, units=degree)
    profile = Profile.from_json(Profile(costs, alpha=(Slowdown("paper", model.layer_seconds),)).to_json())
    problem = Problem(profile, nodes_of(8, model.devices).with_rates({0: rate}))
    given = situation(problem, Shape(model.pipelines, degree, micro_batches=64))
    assert given.layer_seconds == model.layer_seconds
    made = search(given)  # memory is ample here, which may spare a little more
    assert made.least_seconds <= made.objective <= seconds
    assert made.standby == (0,)


def test_a_situation_leaves_out_groups_that_are_no_faster() -> None:
    slowed = replace(MODEL, alpha=(Slowdown("paper", {4: 2.0, 2: 1.0, 1: 1.5}),))
    made = situation(Problem(slowed, eight({})), Shape(pipelines=2, largest_group=4, micro_batches=8))
    assert made.layer_seconds == {2: 1.0, 1: 1.5}
    assert (made.num_layers, made.num_pipelines, made.num_micro_batches) == (16, 2, 8)
    assert made.memory is not None
    assert made.cluster.devices[0].memory_bytes == int(0.9 * (1 << 40))


def test_rows_that_meet_are_neither_cut_into_stages_nor_micro_batches() -> None:
    options = PlanOptions.of_program(mixes_rows=True)
    plan = make_plan(MODEL, eight({0: 3.0}), options=options, search="malleus")
    assert all(len(pipeline.stages) == 1 and pipeline.micro_batches == 1 for pipeline in plan.pipelines)


def test_a_program_without_blocks_is_refused() -> None:
    bare = Profile(ProgramCosts(8, PartCosts(flops=1e9), (), PartCosts()))
    with pytest.raises(PlanError, match="search 'malleus' cannot be used here: it places repeated blocks"):
        make_plan(bare, paper(1, 1), search="malleus")


def test_a_long_search_tells_how_far_it_is_and_answers_the_same() -> None:
    told: list[tuple[Any, ...]] = []
    problem = Problem(MODEL, eight({5: 1.7}))
    assert make_plans(replace(problem, tell=lambda *now: told.append(now)), "malleus") == make_plans(problem, "malleus")
    assert [done for _, done, _ in told] == list(range(told[0][2]))
