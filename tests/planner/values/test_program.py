from dataclasses import replace

import pytest

from hetu_fx.errors import PlanError
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan

BEFORE, BLOCK, AFTER = PartCosts(parameter_bytes=5), PartCosts(10, 8, num_ops=3), PartCosts(flops=7)
PROGRAM = ProgramCosts(4, BEFORE, (BLOCK, BLOCK, BLOCK), AFTER, (1.0, 1.0))


def test_stages_sum_their_blocks_and_the_ends() -> None:
    assert PROGRAM.stage(1, 2) == BLOCK
    assert PROGRAM.stage(0, 1) == BEFORE + BLOCK
    assert PROGRAM.stage(1, 3) == BLOCK + BLOCK + AFTER
    assert PROGRAM.whole == PartCosts(flops=37, split_flops=24, parameter_bytes=5, num_ops=9)


def test_a_program_without_blocks_is_its_ends() -> None:
    assert ProgramCosts(1, BEFORE, (), AFTER).whole == BEFORE + AFTER


def test_a_plan_asks_for_a_shared_sequence() -> None:
    part = PartCosts(activation_bytes=8, split_activation_bytes=4, sequence_activation_bytes=2)
    program = ProgramCosts(4, part, (part,), part)
    assert program.has_sequence
    assert not PROGRAM.has_sequence
    assert program.under(Plan.single()) is program
    shared = program.under(replace(Plan.tensor_parallel((0, 1)), sequence_parallel=True))
    assert shared.whole.activation_bytes_at(0.5) == 15


def test_boundaries_lie_between_blocks() -> None:
    assert [PROGRAM.boundary(block) for block in range(4)] == [0.0, 1.0, 1.0, 0.0]
    assert PROGRAM.is_uniform
    assert not ProgramCosts(4, BEFORE, (BLOCK, AFTER), AFTER, (1.0,)).is_uniform


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="1 boundaries for 3 blocks; give 2"):
        ProgramCosts(4, BEFORE, (BLOCK,) * 3, AFTER, (1.0,))
    with pytest.raises(PlanError, match="rows 0, units 1; give 1 or more"):
        ProgramCosts(0, BEFORE, (), AFTER)
