from dataclasses import replace

import pytest

from hetu_fx.errors import PlanError
from hetu_fx.planner.values.footprint import PartMemory, RecomputeMemory, Segment, StageFootprint, maximum_at
from hetu_fx.planner.values.line import Amount, Line

PART = PartMemory(kept=Amount(per_row=10), forward=Amount(per_row=14), backward=Amount(per_row=3), later=Amount(2, 3))


def test_a_group_holds_what_is_split_in_shares() -> None:
    amount = Amount(fixed=8, per_row=10, split_fixed=4, split_per_row=10)
    assert amount.at(3) == 8 + 30
    assert amount.at(3, 0.25) == 4 + 1 + 2.5 * 3


def test_a_part_that_is_recomputed_keeps_less_and_comes_back_at_once_where_its_pieces_are_not_known() -> None:
    again = StageFootprint.of([PART.recomputed("alone", Amount(per_row=4), "all")], [100], share=1.0)
    assert again.kept == (0, 4)
    assert again.forward == ((0, 14),)
    assert (again.backward, again.later) == (((0, 13),), ((2, 13),))


def test_pieces_come_back_one_after_another() -> None:
    first = Segment(Amount(), sent=Amount(per_row=2), forward=Amount(per_row=6), backward=Amount(8, 7), later=Amount())
    second = Segment(kept=Amount(per_row=1), forward=Amount(per_row=9), backward=Amount(0, 9), later=Amount(per_row=9))
    block = replace(PART, again=RecomputeMemory(tensor=(first, second))).recomputed("tensor", Amount(per_row=50), "all")
    stage = StageFootprint.of([block, PART], [0, 30], share=1.0, before=Line(0, 5))
    assert stage.kept == (0, 5 + 2 + 1 + 10)
    assert stage.forward == ((0, 5 + 2 + 1 + 14),)
    # the last part with all that is kept, the second piece with what the first has sent, or the first alone
    assert maximum_at(stage.backward, 1) == 30 + 8 + 5 + 7
    assert maximum_at(stage.backward, 100) == 100 * (5 + 3 + 10 + 3)
    assert maximum_at([line for line in stage.backward if line[0]], 10) == 30 + 10 * (5 + 2 + 9)


@pytest.mark.parametrize("count", range(1, 6))
def test_parts_that_are_alike_hold_what_they_hold_one_by_one(count: int) -> None:
    again = PART.recomputed("alone", Amount(per_row=4), "all")
    alike, gradients = [*[again] * count, *[PART] * count, PART], [30.0] * (2 * count) + [90.0]
    apart = [replace(part) for part in alike]
    one, other = (StageFootprint.of(parts, gradients, 0.5, Line(3, 1), gradients) for parts in (alike, apart))
    assert one.kept == other.kept
    for rows in (0, 1, 5, 1000):
        for name in ("forward", "backward", "later"):
            assert maximum_at(getattr(one, name), rows) == pytest.approx(maximum_at(getattr(other, name), rows))


def test_a_context_parallel_group_has_the_whole_of_what_it_gathers() -> None:
    gathers = Segment(kept=Amount(per_row=4), sent=Amount(per_row=6), forward=Amount(per_row=20))
    reads = Segment(kept=Amount(per_row=4), forward=Amount(per_row=20))
    first, second = RecomputeMemory(context=(gathers, reads)).by_sequence.context
    assert (first.kept.at(1, 0.5), first.sent.at(1, 0.5), first.forward.at(1, 0.5)) == (2, 6, 10)
    assert second.forward.at(1, 0.5) == 6 + 14 / 2  # what it has been sent comes with a cotangent that is whole too


def test_sums_are_spread_over_those_that_share_the_sequence() -> None:
    piece = Segment(sent=Amount(per_row=6, sequence_per_row=6))
    again = RecomputeMemory(tensor=(piece, piece), sequence=(piece,), grid=(piece,))
    assert [one.sent.at(1, 0.5) for one in again.in_sequence.tensor] == [3]
    narrow = again.amounts(lambda amount: amount.narrowed(0.5))
    assert narrow.by_sequence.grid[0].sent.at(1, 0.5) == 3


def test_parts_stack_up_forward_and_their_gradients_backward() -> None:
    stage = StageFootprint.of([PART, PART], [100, 50], share=1.0, before=Line(7, 1))
    assert stage.kept == (7, 21)
    assert maximum_at(stage.forward, 2) == 7 + 2 * (1 + 10 + 14)
    assert maximum_at(stage.later, 2) == 7 + 2 + 2 * (21 + 3)
    # the last part's turn with all that is kept, or the first part's with the last one's gradients
    assert maximum_at(stage.backward, 1) == max(7 + 21 + 3, 7 + 11 + 3 + 50)
    assert maximum_at(stage.backward, 100) == 7 + 100 * 24


def test_only_lines_that_can_be_the_highest_are_left() -> None:
    low = PartMemory(kept=Amount(), forward=Amount(per_row=1))
    stage = StageFootprint.of([PART, low, low], [0, 0, 0], share=1.0)
    assert stage.forward == ((0, 14),)


def test_gradients_are_given_for_every_part() -> None:
    with pytest.raises(PlanError, match="2 parts, but gradients of 1"):
        StageFootprint.of([PART, PART], [1], share=1.0)
