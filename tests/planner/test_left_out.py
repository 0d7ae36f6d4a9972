"""Why devices are left out, and what brings them in."""

from __future__ import annotations

from dataclasses import replace

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.left_out import with_reasons
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.prediction import Prediction
from tests.planner.examples import transformer

COSTS = transformer(rows=16, width=128)


def cluster(inter: float = 1e6, memory_bytes: int = 1 << 34) -> Cluster:
    return Cluster.on_paper(
        [2e10, 2e10, 2e10],
        nodes=["a", "a", "b"],
        kinds=["here", "here", "away"],
        memory_bytes=[1 << 34, 1 << 34, memory_bytes],
        intra=Link(1e10, 1e-6),
        inter=Link(inter, 1e-5),
    )


def problem(inter: float = 1e6, memory_bytes: int = 1 << 34) -> Problem:
    return Problem(Profile(COSTS), cluster(inter, memory_bytes))


def reasons(plan: Plan, asked: Problem) -> tuple[str, ...]:
    told = with_reasons(replace(plan, predicted=Prediction(1.0)), asked).predicted
    assert told is not None
    return told.left_out_why


def test_a_device_behind_a_slow_link_says_what_it_would_cost_and_from_which_link_and_batch_on_it_pays() -> None:
    plan = make_plan(COSTS, cluster())
    assert set(plan.devices) == {0, 1}
    (why,) = reasons(plan, problem())
    assert why.startswith("2 (away): with them a step takes ")
    assert "sync" in why
    assert "they pay from " in why
    assert "Gbit/s between nodes" in why
    assert "rows a step on" in why
    rate = float(why.split("they pay from ")[1].split()[0]) * 1e9 / 8
    assert set(make_plan(COSTS, cluster(2 * rate)).devices) == {0, 1, 2}, "with such a link the device is taken"


def test_a_device_that_has_no_room_and_one_that_is_too_few_say_so() -> None:
    plan = Plan.data_parallel([0, 1]).with_blocks(COSTS.num_blocks)
    (why,) = reasons(plan, problem(memory_bytes=1_000_000))
    assert why.startswith("2 (away): another replica on them needs ")
    assert why.endswith("kB each; more memory brings them in") or why.endswith("MB each; more memory brings them in")
    few = Problem(Profile(replace(COSTS, rows=2)), cluster())
    assert reasons(plan, few) == ("2 (away): they would have less than a row each; a larger batch brings them in",)
    both = Plan.tensor_parallel([0, 1]).with_blocks(COSTS.num_blocks)
    assert reasons(both, problem()) == ("2 (away): too few for another replica of 2 devices",)


def test_a_plan_of_all_devices_has_no_reasons() -> None:
    assert reasons(Plan.data_parallel([0, 1, 2]).with_blocks(COSTS.num_blocks), problem()) == ()


def test_each_kind_of_devices_of_a_large_cluster_has_its_reason() -> None:
    kinds = ["fast"] * 64 + ["middle"] * 32 + ["slow"] * 32
    nodes = [f"n{rank // 8}" for rank in range(128)]
    large = Cluster.on_paper([2e12] * 64 + [1e12] * 64, nodes=nodes, kinds=kinds, inter=Link(1e7, 1e-4))
    plan = Plan.data_parallel(range(64)).with_blocks(COSTS.num_blocks)
    asked = Problem(Profile(transformer(rows=256, width=128)), large)
    told = reasons(plan, asked)
    assert [why.split(": with them a step takes ")[0] for why in told] == ["64-95 (middle)", "96-127 (slow)"]
