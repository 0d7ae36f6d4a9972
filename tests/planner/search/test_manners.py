from dataclasses import replace

import pytest

from benchmarks.cases.planning import cluster, llama
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.search.contiguous import CONTIGUOUS
from hetu_fx.planner.search.homogeneous import HOMOGENEOUS
from hetu_fx.planner.search.manners import contexts, shared_throughout
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from tests.planner.examples import paper, transformer

COSTS = replace(transformer(layers=4, rows=16, length=4096, width=512), sequence_units=4096)


def shares(plan: Plan) -> bool:
    return any(stage.shares_sequence for *_, stage in plan.stages)


def one_row(costs: ProgramCosts = COSTS) -> Profile:
    return Profile(replace(costs, rows=1))


def test_a_row_that_is_longer_than_a_device_has_room_for_is_shared() -> None:
    long = llama(32, 4096, 11008, rows=1, units=32, length=1 << 20, width=4096)
    made = make_plan(long, cluster({"A100-80G": 16}))
    assert made.predicted is not None
    assert made.attention == "ring"
    assert {stage.context for *_, stage in made.stages} == {16}
    assert all(device.total_bytes <= 0.9 * (device.limit_bytes or 0) for device in made.predicted.devices)


def test_keys_and_values_are_gathered_where_there_is_room_for_them() -> None:
    made = make_plan(one_row(), paper(1, 1, 1, 1), options=PlanOptions(tensor_parallel=False, pipelines=False))
    assert made.attention == "auto"
    assert [stage.context for *_, stage in made.stages] == [4]


def test_shares_of_unlike_devices_are_as_their_speeds() -> None:
    options = PlanOptions(tensor_parallel=False, pipelines=False)
    found = CONTIGUOUS.find(Problem(one_row(), paper(3000, 1000), options))
    best = min(found, key=lambda plan: found[plan])
    assert [(stage.devices, stage.ratios) for *_, stage in best.stages] == [((0, 1), (3, 1))]


def test_groups_of_a_stage_share_a_sequence_where_the_model_has_few_parts_to_split() -> None:
    costs = replace(COSTS, rows=1, units=2)
    found = HOMOGENEOUS.find(Problem(Profile(costs), paper(1, 1, 1, 1), PlanOptions(pipelines=False)))
    assert any(stage.is_grid for plan in found for *_, stage in plan.stages)


def test_nothing_is_shared_where_rows_are_many_and_fit() -> None:
    assert not any(map(shares, HOMOGENEOUS.find(Problem(Profile(COSTS), paper(1, 1, 1, 1)))))


@pytest.mark.parametrize("change", [{"sequence_units": 1}, {}])
def test_what_cannot_be_shared_or_is_ruled_out_is_not(change: dict[str, int]) -> None:
    options = PlanOptions(context_parallel=bool(change))
    problem = Problem(one_row(replace(COSTS, **change)), paper(1, 1), options)
    assert not shared_throughout(problem, ())
    assert not any(map(shares, HOMOGENEOUS.find(problem)))


def test_parts_of_a_sequence_double_up_to_all_devices_or_tokens() -> None:
    assert list(contexts(12, Problem(one_row(), paper(1)))) == [2, 4, 8, 12]
    assert list(contexts(12, Problem(one_row(replace(COSTS, sequence_units=3)), paper(1)))) == [2, 3]
    assert list(contexts(1, Problem(one_row(), paper(1)))) == []


def test_groups_share_the_sequence_between_products_where_memory_asks_for_it() -> None:
    kept = COSTS.whole.activation_bytes
    tight = paper(1, 1, memory_bytes=int(0.85 * kept))
    options = PlanOptions(recompute=False, context_parallel=False, pipelines=False)
    found = HOMOGENEOUS.find(Problem(one_row(), tight, options))
    assert found
    assert all(plan.sequence_parallel for plan in found)
    assert not HOMOGENEOUS.find(Problem(one_row(), tight, replace(options, sequence_parallel=False)))
