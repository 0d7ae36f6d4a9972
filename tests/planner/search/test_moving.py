from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.staying import moving, moving_seconds
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.planner.values.state import ParameterState
from hetu_fx.plans.plan import Pipeline, Plan, Stage

BLOCK = PartCosts(flops=1e9, parameter_bytes=6e6, split_parameter_bytes=6e6)
COSTS = ProgramCosts(8, PartCosts(), (BLOCK,) * 4, PartCosts(), (1.0,) * 3, units=2)
LINK = Link(1e6)  # a parameter's byte with its two moments takes 3 microseconds
TWO = Cluster.on_paper([1e12] * 4, intra=LINK)


def chain(*stages: tuple[tuple[int, ...], int], zero: int = 1) -> Plan:
    return Plan((Pipeline(tuple(Stage(devices, blocks=blocks) for devices, blocks in stages)),), zero=zero)


def test_a_block_that_goes_to_the_next_stage_takes_its_states_with_it() -> None:
    one, other = chain(((0,), 2), ((1,), 2)), chain(((0,), 1), ((1,), 3))
    assert moving_seconds(one, other, COSTS, TWO) == pytest.approx(3 * 6e6 / 1e6)
    assert moving_seconds(one, one, COSTS, TWO) == 0


def test_a_group_that_grows_sends_half_of_what_it_has() -> None:
    assert moving_seconds(chain(((0,), 4)), chain(((0, 1), 4)), COSTS, TWO) == pytest.approx(3 * 4 * 3e6 / 1e6)


def test_replicas_own_each_entry_once_unless_states_are_not_spread() -> None:
    spread, kept = (Plan((Pipeline((Stage((0,)),)), Pipeline((Stage((1,)),))), zero=zero) for zero in (1, 0))
    alone = chain(((0,), 4))
    assert moving_seconds(alone, spread, COSTS, TWO) == pytest.approx(3 * 4 * 3e6 / 1e6)
    assert moving_seconds(alone, kept, COSTS, TWO) == pytest.approx(3 * 4 * 6e6 / 1e6)
    assert moving_seconds(kept, alone, COSTS, TWO) == 0


def test_what_the_optimizer_keeps_goes_along() -> None:
    mixed = replace(COSTS, state=ParameterState("bf16", gradient="fp32", master="fp32"))
    one, other = chain(((0,), 2), ((1,), 2)), chain(((0,), 1), ((1,), 3))
    assert moving(one, other, mixed, TWO).bytes == pytest.approx((1 + 3 * 2) * 6e6)  # three of fp32 beside one of bf16
    assert moving(one, other, COSTS, TWO).rounds == (((0, 1, 3 * 6e6),),)


def test_what_a_device_held_that_is_gone_comes_from_a_replica() -> None:
    replicas = Plan(
        (Pipeline((Stage((0,)), Stage((1,))), share=1), Pipeline((Stage((2,)), Stage((9,))), share=1)), zero=0
    )
    found = moving(replicas.with_blocks(4), chain(((0,), 2), ((2,), 2), zero=0), COSTS, TWO)
    assert found.rounds == (((1, 2, 3 * 12e6),),)


def test_what_was_on_devices_alone_that_are_gone_is_lost() -> None:
    with pytest.raises(
        PlanError, match=r"uses devices \[5\], which are gone, .* block 0 was nowhere else\nhint: .* load a che"
    ):
        moving_seconds(chain(((5,), 4), zero=0), chain(((0,), 4)), COSTS, TWO)
    spread = Plan((Pipeline((Stage((0,)),)), Pipeline((Stage((5,)),))))
    with pytest.raises(PlanError, match=r"devices \[5\], .* states are spread over replicas \(zero 1\)"):
        moving_seconds(spread, chain(((0,), 4)), COSTS, TWO)
