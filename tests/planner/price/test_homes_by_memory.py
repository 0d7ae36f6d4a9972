from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import PlanOptions, make_plan
from hetu_fx.planner.price.placement import device_bytes, device_shards, homes_by_memory
from hetu_fx.planner.price.step import PricedStep, memory_problems, predict
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=8, rows=16, length=128, width=256)
FASTEST_IS_SMALLEST = PlanOptions(recompute=False, pipelines=False, tensor_parallel=False, context_parallel=False)


def unequal(*memory: int) -> Cluster:
    """Return devices of so many bytes, of which earlier ones are faster."""
    speeds = [100.0 * (len(memory) - rank) for rank in range(len(memory))]
    cluster = paper(*speeds)
    devices = (replace(d, memory_bytes=size) for d, size in zip(cluster.devices, memory, strict=True))
    return replace(cluster, devices=tuple(devices))


def test_devices_own_in_proportion_to_what_is_left_beside_all_else() -> None:
    plan = Plan.data_parallel(2, zero=3).with_blocks(COSTS.num_blocks)
    limits = {0: 400_000_000, 1: 360_000_000}
    homed = homes_by_memory(plan, COSTS, limits)
    assert homed.pipelines == plan.pipelines
    held = device_bytes(homed, COSTS, {})
    used = {rank: sum(count for _, count in terms) for rank, terms in held.items()}
    assert all(used[rank] <= limits[rank] for rank in limits)
    shards = device_shards(homed, COSTS, {})
    assert sum(shard.owned for shard in shards.values()) == pytest.approx(COSTS.whole.parameter_bytes)


def test_homes_go_where_memory_is_and_rows_where_speed_is() -> None:
    by_speed = make_plan(COSTS, unequal(10**9, 10**9), options=FASTEST_IS_SMALLEST)
    assert not by_speed.homes
    need = max(device.total_bytes for device in by_speed.predicted.devices)  # type: ignore[union-attr]
    cluster = unequal(int(need), 10**9)
    plan = make_plan(COSTS, cluster, options=FASTEST_IS_SMALLEST)
    assert plan.pipelines[0].share > plan.pipelines[1].share
    assert plan.homes[0] < plan.homes[1]
    assert not memory_problems(predict(plan, COSTS, cluster), cluster, FASTEST_IS_SMALLEST.memory_fraction)


def test_like_devices_with_unlike_homes_must_all_fit() -> None:
    cluster = paper(100, 100, memory_bytes=380_000_000)
    plan = replace(Plan.data_parallel(2, zero=3).with_blocks(COSTS.num_blocks), homes=(1, 20))
    held = [device.total_bytes for device in predict(plan, COSTS, cluster).devices]
    limited = paper(100, 100, memory_bytes=sum(held) // 2)
    assert held[0] < sum(held) // 2 < held[1]
    assert not PricedStep(plan, COSTS, limited).fits(1.0)
    assert PricedStep(replace(plan, homes=()), COSTS, limited).fits(1.0)


def test_a_device_without_room_owns_nothing() -> None:
    plan = Plan.data_parallel(2, zero=3).with_blocks(COSTS.num_blocks)
    assert homes_by_memory(plan, COSTS, {0: 1, 1: 10**9}).homes == (0, 1)
    assert not homes_by_memory(plan, COSTS, {0: 1, 1: 1}).homes


@pytest.mark.parametrize("homes", [(3, 1), (0, 5), (7, 2, 4)])
def test_shares_of_homes_are_read_back_from_a_plan_file(homes: tuple[int, ...]) -> None:
    plan = replace(Plan.data_parallel(2), homes=homes)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.home_weights({}) == dict(enumerate(plan.homes))
    assert "homes" not in Plan.data_parallel(2).to_json()


@pytest.mark.parametrize(
    ("homes", "zero", "told"),
    [
        ((1,), 1, "shares of 1 ranks, but the plan uses device 1"),
        ((0, 0, 1), 1, "some above 0"),
        ((1, -1), 1, "whole number from 0"),
        ((1, 1), 0, "zero 0"),
    ],
)
def test_shares_of_homes_that_cannot_be_are_refused(homes: tuple[int, ...], zero: int, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        Plan((Pipeline((Stage((0,)),)), Pipeline((Stage((1,)),))), zero=zero, homes=homes)
