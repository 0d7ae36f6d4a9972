from collections.abc import Sequence

import pytest

from hetu_fx.planner.price.schedule_seconds import finish
from hetu_fx.planner.price.stage_seconds import StageCosts
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.plans.plan import Schedule, Stage
from hetu_fx.plans.schedule import Phase


def stage(seconds: float, again: float = 0.0, host: float = 0.0) -> StageCosts:
    """Return a stage of so many seconds per row, a third of it forward, `again` of it forward once more.

    All of its work is products with weights.
    `host` is what a step takes on its host.
    """
    nothing = Line()
    later = Line(0.0, (seconds - again) / 3)
    lines = (Line(0.0, seconds),), nothing, nothing, nothing, nothing, (Line(0.0, again),), (later,)
    return StageCosts(Stage((0,)), (PartCosts(),), (), (host,), *lines)


def scheduled_seconds(
    stages: Sequence[StageCosts], rows: int, micro_batches: int, schedule: Schedule, chunks: int = 1
) -> float:
    return finish(stages, rows, micro_batches, schedule, chunks=chunks).seconds


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_fill_drain_and_are_busy_in_between(schedule: str) -> None:
    assert scheduled_seconds([stage(3.0)] * 4, 8, 8, schedule) == pytest.approx(3 * (8 + 4 - 1))
    assert scheduled_seconds([stage(3.0)], 8, 3, schedule) == pytest.approx(3 * 8)
    assert scheduled_seconds([stage(3.0)] * 2, 0, 3, schedule) == 0.0


@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_divide_what_stages_wait_while_they_fill_and_drain(chunks: int) -> None:
    parts = [stage(12.0 / chunks)] * 4 * chunks
    assert scheduled_seconds(parts, 8, 8, "interleaved", chunks) == pytest.approx(12 * (8 + 3 / chunks))
    assert scheduled_seconds(parts, 8, 8, "zero-bubble", chunks) == pytest.approx(12 * (8 + 1 / chunks))


def test_gradients_of_later_chunks_are_done_when_their_stage_is() -> None:
    found = finish([stage(3.0)] * 4, 2, 2, "interleaved", chunks=2)
    assert found.ends[:2] == found.ends[2:]
    assert [found.done(part, 0.5) == found.ends[part] for part in range(4)] == [False, False, True, True]


def test_larger_micro_batches_come_first_and_there_are_no_more_than_rows() -> None:
    # the first stage: forwards of 2 rows and of 1, waits for 8, backwards of both
    assert scheduled_seconds([stage(3.0)] * 2, 3, 2, "1f1b") == pytest.approx(8 + 4 + 2)
    assert scheduled_seconds([stage(3.0)] * 2, 2, 8, "1f1b") == pytest.approx(3 * 3)


def test_what_a_step_takes_on_a_host_comes_first_and_may_pass_while_a_stage_waits() -> None:
    first, last = [stage(3.0, host=2.0), stage(3.0)], [stage(3.0), stage(3.0, host=2.0)]
    assert scheduled_seconds(first, 8, 8, "1f1b") == pytest.approx(2 + 3 * (8 + 2 - 1))
    assert scheduled_seconds(last, 8, 8, "1f1b") == pytest.approx(1 + 3 * (8 + 2 - 1))
    assert scheduled_seconds(last, 0, 8, "1f1b") == 2


def test_a_slow_stage_sets_the_pace_wherever_it_stands() -> None:
    for place in range(3):
        stages = [stage(9.0) if index == place else stage(3.0) for index in range(3)]
        found = scheduled_seconds(stages, 16, 16, "1f1b")
        assert 16 * 9 <= found <= 16 * 9 + 2 * 3  # others fill and drain, all but hidden where it stands in front


def test_a_forward_that_is_done_once_more_counts_with_the_backward() -> None:
    plain, again = stage(3.0), stage(4.0, again=1.0)
    seconds = {phase: (plain.seconds_of(phase, 2), again.seconds_of(phase, 2)) for phase in Phase}
    assert seconds == {
        Phase.FORWARD: (2.0, 2.0),
        Phase.BACKWARD: (4.0, 6.0),
        Phase.INPUT_GRADIENT: (2.0, 4.0),
        Phase.WEIGHT_GRADIENT: (2.0, 2.0),
    }
