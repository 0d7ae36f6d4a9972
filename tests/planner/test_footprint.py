import pytest

from hetu_fx.errors import PlanError
from hetu_fx.planner.footprint import Amount, PartMemory, StageFootprint, highest_at

PART = PartMemory(kept=Amount(per_row=10), forward=Amount(per_row=14), backward=Amount(per_row=3), later=Amount(2, 3))


def test_a_group_holds_what_is_split_in_shares() -> None:
    amount = Amount(fixed=8, per_row=10, split_fixed=4, split_per_row=10)
    assert amount.at(3) == 8 + 30
    assert amount.at(3, 0.25) == 4 + 1 + 2.5 * 3


def test_a_part_that_is_recomputed_keeps_less_and_holds_the_rest_while_it_goes_backward() -> None:
    again = PART.recomputed(Amount(per_row=4))
    assert again.kept.per_row == 4
    assert again.backward.per_row == 3 + 6
    assert again.later == Amount(2, 3 + 6)
    assert again.forward == PART.forward


def test_parts_stack_up_forward_and_their_gradients_backward() -> None:
    stage = StageFootprint.of([PART, PART], [100, 50], share=1.0, before=(7, 1))
    assert stage.kept == (7, 21)
    assert highest_at(stage.forward, 2) == 7 + 2 * (1 + 10 + 14)
    assert highest_at(stage.later, 2) == 7 + 2 + 2 * (21 + 3)
    # the last part's turn with all that is kept, or the first part's with the last one's gradients
    assert highest_at(stage.backward, 1) == max(7 + 21 + 3, 7 + 11 + 3 + 50)
    assert highest_at(stage.backward, 100) == 7 + 100 * 24


def test_only_lines_that_can_be_the_highest_are_left() -> None:
    low = PartMemory(kept=Amount(), forward=Amount(per_row=1))
    stage = StageFootprint.of([PART, low, low], [0, 0, 0], share=1.0)
    assert stage.forward == ((0, 14),)


def test_gradients_are_given_for_every_part() -> None:
    with pytest.raises(PlanError, match="2 parts, but gradients of 1"):
        StageFootprint.of([PART, PART], [1], share=1.0)
