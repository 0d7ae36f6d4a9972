"""A batch becomes micro-batches that the pipelines hold, every sequence once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.errors import BatchError, PlanError
from hetu_fx.planner.dispatch.assignment import ANY_LENGTH, Batching, EligibleVariant, Request
from hetu_fx.planner.dispatch.policies import EarliestFinish, HotSPa, Hydraulis, assign
from hetu_fx.planner.dispatch.scheme_costs import Scheme, TimeFit
from hetu_fx.plans.plan import Pipeline, Plan, Stage

LINEAR = TimeFit(a=0.0, b=1.0, c=1.0)
QUADRATIC = TimeFit(a=0.1, b=1.0, c=1.0)


def candidate(name: str, *held: int, times: TimeFit = LINEAR) -> EligibleVariant:
    """A variant with a pipeline of one device for each of these limits."""
    plan = Plan.data_parallel(range(len(held)))
    return EligibleVariant(name, plan, tuple(Scheme(1, 1, times, most) for most in held))


def two_stages(name: str, held: int) -> EligibleVariant:
    plan = Plan((Pipeline((Stage((0,)), Stage((1,)))),))
    return EligibleVariant(name, plan, (Scheme(1, 2, LINEAR, held),))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    held=st.lists(st.integers(30, 90), min_size=1, max_size=3),
    batching=st.sampled_from(Batching),
)
def test_every_sequence_stands_once_where_it_fits(lengths: list[int], held: list[int], batching: Batching) -> None:
    found = assign([candidate("one", *held)], Request(tuple(lengths), batching))
    assert sorted(found.positions) == list(range(len(lengths)))
    for micro in found.micro_batches:
        assert all(sum(lengths[i] for i in row) <= micro.width for row in micro.rows)
    if batching not in (Batching.DISPATCHED, Batching.PACKED, Batching.WHOLE_ROWS):
        return
    for most, micro_batches in zip(held, found.pipelines, strict=True):
        assert all(len(micro.rows) * micro.width <= most for micro in micro_batches)


def test_a_sequence_goes_to_a_pipeline_that_holds_it() -> None:
    found = assign([candidate("one", 8, 32, 8)], Request((30, 7, 7, 7, 7)))
    long, *_ = found.pipelines[1]
    assert long.rows == ((0,),)
    assert sorted(found.positions) == [0, 1, 2, 3, 4]


def test_rows_have_a_multiple_of_tokens() -> None:
    found = assign([candidate("one", 64)], Request((5, 9, 17), multiple=8))
    assert all(micro.width % 8 == 0 for micro in found.micro_batches)


def test_short_sequences_are_packed_unless_attention_is_paid_for_whole_rows_and_costs_more() -> None:
    lengths, dear = (16,) * 8, [candidate("one", 128, times=QUADRATIC)]
    cheap = assign([candidate("one", 128)], Request(lengths, whole_rows=True))
    assert [len(row) for micro in cheap.micro_batches for row in micro.rows] == [8]
    whole = assign(dear, Request(lengths, whole_rows=True))
    assert [micro.width for micro in whole.micro_batches] == [16] * 8, "a row of 128 has 8 times the pairs of tokens"
    by_sequence = assign(dear, Request(lengths))
    assert [micro.width for micro in by_sequence.micro_batches] == [128]
    assert by_sequence.seconds == pytest.approx(8 * QUADRATIC.seconds(16) + 1)
    assert whole.seconds == pytest.approx(8 * (QUADRATIC.seconds(16) + 1))


def test_packing_by_whole_rows_is_priced_by_what_attention_costs_here() -> None:
    lengths, dear = (16,) * 8, [candidate("one", 128, times=QUADRATIC)]
    found = assign(dear, Request(lengths, Batching.WHOLE_ROWS))
    assert [micro.width for micro in found.micro_batches] == [16] * 8
    assert (
        found.seconds
        == assign(dear, Request(lengths, whole_rows=True)).seconds
        > assign(dear, Request(lengths)).seconds
    )


def test_attention_is_paid_for_what_fills_a_row_too() -> None:
    (micro,) = assign([candidate("one", 8)], Request((3, 2), multiple=8)).micro_batches
    assert (micro.width, sorted(micro.runs)) == (8, [2, 3, 3])
    (padded, other) = assign([candidate("one", 8)], Request((8, 5), Batching.PADDED)).micro_batches
    assert (padded.runs, sorted(other.runs)) == ((8,), [3, 5])
    (whole,) = assign([candidate("one", 8)], Request((3, 2), multiple=8, whole_rows=True)).micro_batches
    assert whole.runs == (8,)


def test_the_variant_that_is_done_first_is_chosen_among_those_that_hold_the_longest() -> None:
    candidates = [candidate("replicas", 16, 16), two_stages("stages", 64)]
    assert assign(candidates, Request((8,) * 6)).variant == "replicas"
    assert assign(candidates, Request((8,) * 6 + (40,))).variant == "stages"
    with pytest.raises(BatchError, match="no variant takes a sequence of 65 tokens"):
        assign(candidates, Request((65,)))


def test_a_variant_that_cannot_be_done_first_is_left_out_of_the_search() -> None:
    one, many = candidate("one", 16), candidate("many", 16, 16, 16)
    alone = [assign([each], Request((8,) * 6)).seconds for each in (one, many)]
    assert assign([one, many], Request((8,) * 6)).seconds == min(alone) < max(alone)


def test_a_pipeline_of_no_limit_holds_what_is_asked_for() -> None:
    unlimited = candidate("one", ANY_LENGTH)
    assert {m.width for m in assign([unlimited], Request((9, 5, 4))).micro_batches} == {9}
    assert {m.width for m in assign([unlimited], Request((9, 5, 4), tokens=18)).micro_batches} == {18}


def test_of_rows_of_one_length_a_micro_batch_has_as_many_as_it_holds() -> None:
    found = assign([candidate("one", 8)], Request((8, 3, 3, 3, 2), Batching.ALIKE))
    assert [(len(micro.rows), micro.width) for micro in found.micro_batches] == [(1, 8), (2, 3), (1, 3), (1, 2)]


def test_rows_that_go_by_shares_are_refused_where_a_pipeline_does_not_hold_them() -> None:
    with pytest.raises(BatchError, match="none of the variants"):
        assign([candidate("one", 8, 32)], Request((30, 7), Batching.GREEDY))


def test_groups_of_lengths_run_one_after_another() -> None:
    candidates = [candidate("short", 8, 8), candidate("long", 64)]
    parts = HotSPa((8, 16))(candidates, Request((30, 3, 12, 5)))
    assert [part.variant for part in parts] == ["short", "long"]
    assert [sorted(part.positions) for part in parts] == [[1, 3], [0, 2]]
    given_variants = HotSPa((8,), ("long", "long"))(candidates, Request((30, 3)))
    assert [sorted(part.positions) for part in given_variants] == [[0, 1]]


def test_groups_need_a_variant_each() -> None:
    with pytest.raises(PlanError, match="make 2 groups"):
        HotSPa((8,), ("one",))
    with pytest.raises(PlanError, match="different numbers of tokens"):
        HotSPa((8, 8))


def test_the_policy_is_followed_that_is_done_first() -> None:
    candidates = [candidate("replicas", *(8,) * 4), two_stages("stages", 64)]
    both = EarliestFinish((Hydraulis(), HotSPa((8,))))
    apart = both(candidates, Request((8,) * 16 + (40,)))
    assert [part.variant for part in apart] == ["replicas", "stages"], "stages take the short ones one after another"
    dear = [replace(one, step_seconds=500.0) for one in candidates]
    assert [part.variant for part in both(dear, Request((8,) * 16 + (40,)))] == ["stages"]
    with pytest.raises(PlanError, match="no policy"):
        EarliestFinish(())


def test_a_model_that_cannot_pack_is_not_packed() -> None:
    (part,) = Hydraulis(Batching.PACKED)([candidate("one", 64)], Request((5, 9), Batching.ALIKE))
    assert all(len(row) == 1 for micro in part.micro_batches for row in micro.rows)


def test_a_multiple_of_no_tokens_is_refused() -> None:
    with pytest.raises(PlanError, match="multiple of 0 tokens"):
        Request((5,), multiple=0)
