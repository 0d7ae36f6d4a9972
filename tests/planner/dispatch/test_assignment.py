"""What a device is expected to compute follows from the rows that its pipeline got, and from its part of them."""

from __future__ import annotations

import pytest

from hetu_fx.planner.dispatch.assignment import Assignment, PackedMicroBatch, device_seconds, make_candidate
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, rising, transformer

BY_LENGTH = {length: transformer(rows=1, length=length) for length in (16, 32, 64)}
CLUSTER = paper(8, 8, 8, 8)
UNEQUAL = Plan((Pipeline((Stage((0,)), Stage((1,)))), Pipeline((Stage((2,)),)), Pipeline((Stage((3,)),))))


def seconds(*pipelines: tuple[PackedMicroBatch, ...]) -> dict[int, float]:
    return device_seconds(Assignment("one", pipelines, 0.0), UNEQUAL, BY_LENGTH, CLUSTER)


def row(width: int, count: int = 1) -> PackedMicroBatch:
    return PackedMicroBatch(tuple((i,) for i in range(count)), width)


def test_stages_share_the_work_of_their_pipeline_and_others_have_their_own() -> None:
    found = seconds((row(48),), (row(48),), ())
    assert found[0] + found[1] == pytest.approx(found[2], rel=0.1), "each stage has half of the blocks"
    assert 3 not in found


def test_work_adds_up_over_micro_batches_which_cost_something_besides_their_tokens() -> None:
    found = seconds((row(32),), (row(20), row(44)), (row(64),))
    alone = [seconds((), (row(width),), ())[2] for width in (20, 44)]
    assert found[2] == pytest.approx(sum(alone))
    assert found[2] > found[3]


def test_attention_of_a_packed_row_is_that_of_its_sequences() -> None:
    """The quadratic part of a row of 16 and 32 tokens is that of rows of 16 and of 32, and it is one micro-batch."""
    together = seconds((), (PackedMicroBatch(((0, 1),), 48, (16, 32)),), ())[2]
    apart, whole = seconds((), (row(16), row(32)), ())[2], seconds((), (row(48),), ())[2]
    once = 2 * seconds((), (row(16),), ())[2] - seconds((), (PackedMicroBatch(((0,), (1,)), 16),), ())[2]
    assert together == pytest.approx(apart - once)
    assert together < whole


def test_a_row_is_expected_to_take_what_one_of_its_length_was_counted_for() -> None:
    assigned, counted = Assignment("one", ((), (row(48),), ()), 0.0), {48: transformer(rows=1, length=48)}
    expected = device_seconds(assigned, UNEQUAL, counted, CLUSTER)
    assert device_seconds(assigned, UNEQUAL, BY_LENGTH, CLUSTER) == pytest.approx(expected)


RISING = {length: rising(transformer(rows=1, length=length)) for length in BY_LENGTH}
WHOLE = Plan((Pipeline((Stage((0,)), Stage((1,)))), Pipeline((Stage((2,)),))))
DEALT = Plan(WHOLE.pipelines, schedule="interleaved", chunks=2)


def test_work_of_a_stage_in_chunks_is_that_of_the_blocks_which_it_holds() -> None:
    """Of blocks of 1 to 4 units the first stage has the first and the third, not the first two."""
    assigned = Assignment("one", ((row(32),), ()), 0.0)
    whole, dealt = (device_seconds(assigned, plan, RISING, CLUSTER) for plan in (WHOLE, DEALT))
    unit = (whole[1] - dealt[1]) / ((3 + 4) - (2 + 4))
    assert dealt[0] - whole[0] == pytest.approx(unit)
    assert whole[0] == pytest.approx((1 + 2) * unit, rel=0.1), "and what stands before all blocks"
    assert sum(dealt.values()) == pytest.approx(sum(whole.values()))


def test_pipelines_in_chunks_fill_in_less_time() -> None:
    """The slower stage has blocks 2 and 4 of 1 to 4 units instead of 3 and 4, and the other waits half as long."""
    whole, dealt = (make_candidate("one", plan, RISING, CLUSTER).schemes for plan in (WHOLE, DEALT))
    assert [scheme.fill for scheme in whole] == [1, 0]
    assert [scheme.fill for scheme in dealt] == [0.5, 0]
    assert [scheme.devices for scheme in dealt] == [scheme.devices for scheme in whole] == [2, 1]
    share = dealt[0].times.seconds(32) / whole[0].times.seconds(32)
    assert share == pytest.approx((2 + 4) / (3 + 4), rel=0.05)
    assert str(dealt[0]) == "<tp 1, pp 2, in 2 chunks>"
