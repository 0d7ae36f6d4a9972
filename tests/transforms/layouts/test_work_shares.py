"""Groups of more devices than there are key-value heads: counted as they run, proposed, priced, and as one device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hetu_fx.annotations.states import Partial
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.captured_program import PlannedProgram
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.values.options import Choice
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from tests.transforms.cases import batch_of
from tests.transforms.plans import deduced, same_in_group
from tests.transforms.test_finer import grouped

pytestmark = pytest.mark.usefixtures("losses_in_double")


@pytest.fixture(scope="module")
def program() -> Program:
    return grouped(8, 2)[0]


@pytest.fixture(scope="module")
def costs(program: Program) -> ProgramCosts:
    return program_costs(program)


def test_groups_may_have_multiples_of_the_key_value_heads_up_to_the_heads_of_queries(costs: ProgramCosts) -> None:
    assert costs.group_sizes(100) == [1, 2, 4, 8]
    assert costs.group_sizes(7) == [1, 2, 4]
    assert costs.for_group(2) is costs
    assert costs.for_group(4) is costs.wide


@pytest.mark.parametrize("count", [4, 8])
def test_a_device_is_counted_the_parameters_that_the_runtime_gives_it(
    count: int, program: Program, costs: ProgramCosts
) -> None:
    made = deduced(program, Plan.tensor_parallel(range(count)))
    held, late = 0.0, 0.0
    for leaf in made.parameters():
        value, gradient = made.parameter_annotations(leaf)
        shape = tuple(leaf.node.meta["val"].shape)
        size = 8 * sum(math.prod(value.region(rank, shape).local_shape) for rank in range(count)) / count
        held += size
        states = [state for sharding in gradient.shardings for state in sharding.axes]
        late += size * any(isinstance(state, Partial) for state in states)
    whole = costs.for_group(count).whole
    assert whole.parameter_bytes_at(1 / count) == held
    assert whole.late_parameter_bytes == late > 0


def test_what_devices_repeat_of_keys_and_values_is_work_and_memory_of_each(costs: ProgramCosts) -> None:
    narrow, wide = costs.blocks[0], costs.for_group(8).blocks[0]
    keys_and_values = narrow.flops - wide.flops
    assert keys_and_values > 0
    assert wide.flops_at(1 / 8) == pytest.approx(narrow.flops / 8 + keys_and_values * (1 - 2 / 8))
    assert wide.activation_bytes_at(1 / 8) > narrow.activation_bytes_at(1 / 8)
    assert costs.memory is not None
    assert costs.wide is not None
    assert costs.wide.memory is not None
    kept, repeated = costs.memory.parts[1].kept, costs.wide.memory.parts[1].kept
    assert repeated.line(1 / 8)(1) > kept.line(1 / 8)(1)
    assert repeated.line(1 / 8)(1) < kept.line(1 / 4)(1)


def test_devices_that_share_a_key_value_head_sum_its_gradients(costs: ProgramCosts) -> None:
    cluster = Cluster.on_paper([1e12] * 4)
    plan = Plan.tensor_parallel(range(4)).with_blocks(costs.num_blocks)
    terms = dict(predict(plan, costs, cluster).devices[0].seconds)
    assert terms["gradient_sync"] > 0
    assert costs.wide is not None
    blocks = tuple(replace(block, late_parameter_bytes=0.0) for block in costs.wide.blocks)
    unsummed = replace(costs, wide=replace(costs.wide, blocks=blocks))
    assert dict(predict(plan, unsummed, cluster).devices[0].seconds)["gradient_sync"] == 0


def test_a_model_that_no_fewer_devices_can_hold_is_split_over_more_than_its_key_value_heads() -> None:
    program, model = grouped(8, 2)
    costs = program_costs(program, rows=1)
    assert costs.wide is not None
    need = 4 * costs.wide.whole.parameter_bytes_at(1 / 8) + costs.wide.whole.activation_bytes
    cluster = Cluster.on_paper([1e12] * 8, memory_bytes=int(1.4 * need))
    alone = Choice.of(forbid=("pipeline", "context", "recompute"))
    plan = PlannedProgram(program, costs).plan(cluster, "auto", choice=alone)
    assert {len(stage.devices) // stage.context for *_, stage in plan.stages} & {4, 8}
    assert "key-value heads" in plan.explain()
    same_in_group(program, model, plan, batch_of("llama", 7), limit=1e-10)


def test_profiles_keep_what_wide_groups_cost(costs: ProgramCosts) -> None:
    profile = Profile(costs)
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.with_rows(7).costs.wide == replace(costs.wide or costs, rows=7)
