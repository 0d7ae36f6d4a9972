import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.planner.cost import predict
from hetu_fx.planner.simulate import Span, StageTimes, run_pipeline, simulate
from hetu_fx.plans import Pipeline, Plan, Schedule, Stage
from tests.planner.examples import paper, transformer


def even(seconds: list[float], micro_batches: int, send: float = 0.0) -> list[StageTimes]:
    """Return stages that take `seconds` for a forward and twice that for a backward."""
    last, m = len(seconds) - 1, micro_batches
    return [
        StageTimes((s,) * m, (2 * s,) * m, (send * (i < last),) * m, (send * (i > 0),) * m)
        for i, s in enumerate(seconds)
    ]


def end(spans: list[Span]) -> float:
    return max(span.end_seconds for span in spans)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_take_the_textbook_time(schedule: Schedule) -> None:
    spans = run_pipeline(even([1.0, 1.0, 1.0], 4), schedule)
    assert end(spans) == (4 + 3 - 1) * 3.0


def test_1f1b_alternates_after_its_warm_up() -> None:
    spans = run_pipeline(even([1.0, 1.0], 3), "1f1b")
    first = [f"{span.kind[0]}{span.micro_batch}" for span in spans if span.stage == 0]
    assert first == ["f0", "f1", "b0", "f2", "b1", "b2"]


def test_gpipe_does_all_forwards_first() -> None:
    spans = run_pipeline(even([1.0, 1.0], 3), "gpipe")
    first = [f"{span.kind[0]}{span.micro_batch}" for span in spans if span.stage == 0]
    assert first == ["f0", "f1", "f2", "b0", "b1", "b2"]


def test_sending_delays_the_receiver_and_the_sender() -> None:
    spans = run_pipeline(even([1.0, 1.0], 1, send=0.5), "1f1b")
    assert [(s.stage, s.kind, s.start_seconds, s.end_seconds) for s in spans] == [
        (0, "forward", 0.0, 1.0),
        (0, "send", 1.0, 1.5),
        (1, "forward", 1.5, 2.5),
        (1, "backward", 2.5, 4.5),
        (1, "send", 4.5, 5.0),
        (0, "backward", 5.0, 7.0),
    ]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 6),
    st.sampled_from(["1f1b", "gpipe"]),
)
def test_a_schedule_is_complete_causal_and_bounded(seconds: list[int], micro_batches: int, schedule: Schedule) -> None:
    spans = run_pipeline(even([float(s) for s in seconds], micro_batches), schedule)
    assert len(spans) == 2 * len(seconds) * micro_batches
    for stage in range(len(seconds)):
        own = [span for span in spans if span.stage == stage]
        assert all(a.end_seconds <= b.start_seconds for a, b in itertools.pairwise(own))
    ends = {(s.stage, s.kind, s.micro_batch): s for s in spans}
    for (stage, kind, m), span in ends.items():
        before = (stage - 1, kind, m) if kind == "forward" else (stage + 1, kind, m)
        if before in ends:
            assert span.start_seconds >= ends[before].end_seconds
    least, most = 3 * max(seconds) * micro_batches, 3 * sum(seconds) * micro_batches
    assert least <= end(spans) <= most


def test_the_simulated_step_equals_the_prediction_of_an_even_pipeline() -> None:
    pipeline = Pipeline((Stage((0,), blocks=2), Stage((1,), blocks=2)), micro_batches=4)
    plan, costs, cluster = Plan((pipeline,)), transformer(vocabulary=1), paper(2, 2)
    assert simulate(plan, costs, cluster).seconds == pytest.approx(predict(plan, costs, cluster).seconds, rel=0.02)


def test_unequal_pipelines_meet_in_the_gradient_sync() -> None:
    front = Pipeline((Stage((0,), blocks=3), Stage((1,), blocks=1)), rows=3, micro_batches=2)
    plan = Plan((front, Pipeline((Stage((2, 3), (3, 1), 4),))))
    timeline = simulate(plan, transformer(), paper(8, 4, 2, 2))
    assert timeline.devices == (0, 1, 2, 3)
    starts = {event.start_seconds for event in timeline.events if event.kind == "gradients"}
    work = [e.end_seconds for e in timeline.events if e.kind in ("forward", "backward", "send")]
    assert starts == {max(work)}


def test_a_replica_without_rows_waits() -> None:
    timeline = simulate(Plan.data_parallel([0, 1], [9, 1]), transformer(rows=1), paper(1, 1))
    assert {event.kind for event in timeline.of(1)} == {"gather", "gradients", "optimizer"}
