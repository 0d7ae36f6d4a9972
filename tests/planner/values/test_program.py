from dataclasses import replace

import pytest

from hetu_fx.errors import PlanError, ProfileError
from hetu_fx.planner.values.footprint import PartMemory, ProgramMemory
from hetu_fx.planner.values.line import Amount
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts, costs_for_length
from hetu_fx.plans.plan import Plan
from tests.planner.examples import transformer

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
    with pytest.raises(PlanError, match="1 boundaries for 3 blocks\nhint: give 2"):
        ProgramCosts(4, BEFORE, (BLOCK,) * 3, AFTER, (1.0,))
    with pytest.raises(PlanError, match="rows 0, units 1, sequence_units 1\nhint: give 1 or more"):
        ProgramCosts(0, BEFORE, (), AFTER)


def at(length: int) -> ProgramCosts:
    return transformer(length=length)


def test_three_lengths_tell_every_other_one() -> None:
    known = {length: at(length) for length in (32, 64, 256)}
    for length in (1, 48, 200, 1000):
        told, counted = costs_for_length(known, length).whole, at(length).whole
        assert told.flops == pytest.approx(counted.flops)
        assert told.activation_bytes == pytest.approx(counted.activation_bytes)
        assert (told.parameter_bytes, told.num_ops) == (counted.parameter_bytes, counted.num_ops)
        assert costs_for_length(known, length).boundary_bytes == pytest.approx(at(length).boundary_bytes)


def test_one_length_tells_others_in_proportion() -> None:
    told = costs_for_length({64: at(64)}, 32)
    assert told.whole.flops == pytest.approx(at(64).whole.flops / 2)
    assert told.whole.parameter_bytes == at(64).whole.parameter_bytes


def holding(length: int) -> ProgramCosts:
    part = PartMemory(kept=Amount(per_row=5 * length + length**2), backward=Amount(fixed=7, per_row=3 * length))
    return replace(at(length), memory=ProgramMemory((part,) * 6, Amount(fixed=9)))


def test_what_parts_hold_for_another_length_is_told_too() -> None:
    three = {length: holding(length) for length in (32, 64, 256)}
    told = costs_for_length(three, 100).memory
    assert told is not None
    assert told.parts[1].kept.per_row == pytest.approx(500 + 100**2)
    assert told.parts[1].backward.at(2) == pytest.approx(7 + 2 * 300)
    proportional = costs_for_length({64: holding(64)}, 32).memory
    assert proportional is not None
    assert proportional.parts[0].backward == Amount(fixed=7, per_row=96)
    assert proportional.everywhere == Amount(fixed=9)
    assert costs_for_length({32: at(32), 64: holding(64), 256: holding(256)}, 100).memory is None


def test_a_known_length_is_taken_as_it_is() -> None:
    costs = at(64)
    assert costs_for_length({64: costs, 32: at(32), 128: at(128)}, 64) is costs


def test_without_a_length_nothing_can_be_told() -> None:
    with pytest.raises(ProfileError, match="give tokens_per_row"):
        costs_for_length({}, 5)
