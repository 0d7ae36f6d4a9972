from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import PlanOptions, make_plan
from hetu_fx.planner.price.placement import device_shards
from hetu_fx.planner.price.step import PricedStep
from hetu_fx.planner.price.ways import UnitCosts, Ways, seconds_beside_units
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.searches import DEFAULT, SEARCHES, SHARDED, find_search
from hetu_fx.planner.simulate.simulate import expect, simulate
from hetu_fx.planner.values.options import Choice
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=8, rows=16, length=128, width=256)
REPLICAS = PlanOptions(pipelines=False, tensor_parallel=False, context_parallel=False)
ROOMY, TIGHT = 300_000_000, 150_000_000


def held(zero: int) -> int:
    """Return what a device holds at its peak."""
    plan = Plan.data_parallel(4, zero=zero).with_blocks(COSTS.num_blocks)
    return PricedStep(plan, COSTS, paper(*[100] * 4)).prediction.devices[0].total_bytes


def test_more_of_zero_never_holds_more() -> None:
    assert held(3) < held(2) <= held(1)


def test_units_of_parameters_take_turns_in_the_buffers_of_two_that_follow_each_other() -> None:
    shard = device_shards(Plan.data_parallel(4, zero=3), COSTS, dict.fromkeys(range(4), 1.0))[0]
    units = COSTS.unit_bytes(1.0)
    assert shard.copied == max(units[::2]) + max(units[1::2])
    assert shard.unit == max(units)


@pytest.mark.parametrize(
    "plan",
    [
        Plan((Pipeline((Stage((0,)), Stage((1,)))),), zero=3),
        Plan((Pipeline((Stage((0,)),), micro_batches=2), Pipeline((Stage((1,)),), micro_batches=2)), zero=3),
    ],
)
def test_plans_of_several_stages_or_micro_batches_hold_what_they_do_under_zero_1(plan: Plan) -> None:
    speeds = dict.fromkeys(range(2), 1.0)
    assert device_shards(plan, COSTS, speeds) == device_shards(replace(plan, zero=1), COSTS, speeds)


def test_replicas_share_no_more_than_they_must_to_fit() -> None:
    for memory, zero in ((ROOMY, 1), (TIGHT, 3)):
        plan = make_plan(COSTS, paper(*[100] * 4, memory_bytes=memory), options=REPLICAS)
        assert plan.zero == zero
        assert plan.is_data_parallel


def test_no_more_is_shared_where_a_pipeline_is_faster() -> None:
    slow = paper(*[100] * 4, memory_bytes=TIGHT, nodes="abcd", inter=Link(1e8, 1e-5))
    assert make_plan(COSTS, slow).zero == 1
    assert SHARDED.find(Problem(Profile(COSTS), slow))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_plan_has_the_zero_that_is_asked_for(zero: int) -> None:
    options = PlanOptions().chosen(Choice.of(zero=zero))
    assert make_plan(COSTS, paper(*[100] * 4, memory_bytes=ROOMY), options=options).zero == zero


def test_what_is_forbidden_is_not_shared() -> None:
    options = REPLICAS.chosen(Choice.of(forbid=["zero_3"]))
    assert make_plan(COSTS, paper(*[100] * 4, memory_bytes=TIGHT), options=options).zero < 3


def test_gathers_and_gradients_of_units_show_where_work_does_not_hide_them() -> None:
    units = [UnitCosts(0.25, 1.0, 2.0)] * 4
    hidden = seconds_beside_units(units, forward=4.0, backward=12.0)
    assert hidden == 1.0 + 2.0  # the first gather and the last gradients
    # without work: 4 gathers, then of each unit the gradients, and the gathers of all but the last
    assert seconds_beside_units(units, forward=0.0, backward=0.0) == 4.0 + 4 * 2.0 + 3 * 1.0


def test_a_step_by_units_takes_its_work_and_what_shows_of_gathers_and_gradients() -> None:
    cluster = paper(*[100] * 4)
    plan = Plan.data_parallel(4, zero=3).with_blocks(COSTS.num_blocks)
    units = Ways(plan, COSTS, cluster).units()
    assert sum(unit.work for unit in units) == pytest.approx(1.0)
    priced = PricedStep(plan, COSTS, cluster)
    ends = priced.prediction.devices[0].seconds
    assert dict(ends)["gather"] == pytest.approx(2 * sum(unit.gather for unit in units), rel=0.1)
    least = priced.prediction.seconds - dict(ends)["gather"] - dict(ends)["gradient_sync"]
    assert least < priced.overlapped_seconds < priced.prediction.seconds
    assert expect(plan, COSTS, cluster).seconds == priced.overlapped_seconds


def test_a_step_by_units_is_not_simulated_job_by_job() -> None:
    with pytest.raises(PlanError, match="simulate it under zero 2"):
        simulate(Plan.data_parallel(4, zero=3), COSTS, paper(*[100] * 4))


def test_who_asks_for_it_where_whole_gradients_fit_is_told_so() -> None:
    cluster = paper(*[100] * 4, memory_bytes=10 * ROOMY)
    with pytest.raises(PlanError, match=r"search 'sharded' finds no plan, though .* fits memory"):
        make_plan(COSTS, cluster, search="sharded")


def test_every_search_is_found_by_its_name_and_says_when_it_applies() -> None:
    for name in SEARCHES:
        assert find_search(name).name == name
        assert find_search(name).applies
    assert DEFAULT in SEARCHES


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"unknown search 'maleus' \(did you mean 'malleus'\?\)"):
        find_search("maleus")


def test_the_default_is_what_is_asked_without_a_name() -> None:
    costs, cluster = transformer(), paper(4, 2)
    assert make_plan(costs, cluster) == make_plan(costs, cluster, search=DEFAULT)


def test_many_devices_are_not_gone_through_one_by_one() -> None:
    with pytest.raises(PlanError, match="it tries all runs of up to 16 devices, but there are 17\nhint: use 'auto'"):
        make_plan(transformer(), paper(*[1] * 17), search="contiguous")
