from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.plan import Schedule
from hetu_fx.planner.memory import in_flight
from hetu_fx.schedule import Phase, actions

SCHEDULES = st.sampled_from(["1f1b", "gpipe"])


@given(SCHEDULES, st.integers(1, 6), st.integers(0, 8), st.data())
def test_every_micro_batch_goes_forward_then_backward_once(
    schedule: Schedule, num_stages: int, micro_batches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, num_stages - 1))
    order = actions(schedule, stage, num_stages, micro_batches)
    forwards = [a.micro_batch for a in order if a.phase is Phase.FORWARD]
    backwards = [a.micro_batch for a in order if a.phase is Phase.BACKWARD]
    assert forwards == backwards == list(range(micro_batches))
    seen: set[int] = set()
    for action in order:
        assert (action.micro_batch in seen) == (action.phase is Phase.BACKWARD)
        seen.add(action.micro_batch)


@given(SCHEDULES, st.integers(1, 6), st.integers(1, 8), st.data())
def test_the_memory_model_counts_what_the_schedule_keeps(
    schedule: Schedule, num_stages: int, micro_batches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, num_stages - 1))
    kept = most = 0
    for action in actions(schedule, stage, num_stages, micro_batches):
        kept += 1 if action.phase is Phase.FORWARD else -1
        most = max(most, kept)
    assert most == in_flight(schedule, stage, num_stages, micro_batches)
