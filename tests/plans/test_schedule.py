import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.planner.values.device_memory import in_flight
from hetu_fx.plans.plan import Schedule
from hetu_fx.plans.schedule import PHASES, Action, Phase, actions, forwards, takings

SCHEDULES = st.sampled_from(["1f1b", "gpipe", "zero-bubble"])


@given(SCHEDULES, st.integers(1, 6), st.integers(0, 8), st.data())
def test_every_micro_batch_goes_through_the_phases_once(
    schedule: Schedule, num_stages: int, micro_batches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, num_stages - 1))
    order = actions(schedule, stage, num_stages, micro_batches)
    for number in range(micro_batches):
        assert tuple(a.phase for a in order if a.micro_batch == number) == PHASES[schedule]
    for phase in PHASES[schedule]:
        assert [a.micro_batch for a in order if a.phase is phase] == list(range(micro_batches))


@given(st.integers(1, 6), st.integers(1, 12))
def test_zero_bubble_is_one_forward_one_backward_but_for_weights(num_stages: int, micro_batches: int) -> None:
    def without_weights(schedule: Schedule, stage: int) -> list[tuple[int, int]]:
        order = actions(schedule, stage, num_stages, micro_batches)
        return [(a.phase.direction, a.micro_batch) for a in order if a.phase.direction]

    for stage in range(num_stages):
        assert without_weights("zero-bubble", stage) == without_weights("1f1b", stage)


@given(SCHEDULES, st.integers(1, 6), st.integers(1, 8), st.data())
def test_the_memory_model_counts_what_the_schedule_keeps(
    schedule: Schedule, num_stages: int, micro_batches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, num_stages - 1))
    kept = most = 0
    for action in actions(schedule, stage, num_stages, micro_batches):
        kept += {Phase.FORWARD: 1, PHASES[schedule][-1]: -1}.get(action.phase, 0)
        most = max(most, kept)
    assert most == in_flight(schedule, stage, num_stages, micro_batches)


def run_on_paper(schedule: Schedule, num_stages: int, micro_batches: int) -> tuple[int, int]:
    """Run all stages side by side, each action when its neighbour's value is there; one action takes one tick.

    Returns (actions left over when nobody can go on, ticks).
    """
    queues = [list(actions(schedule, stage, num_stages, micro_batches)) for stage in range(num_stages)]
    done: set[tuple[int, Phase, int]] = set()
    for tick in itertools.count():
        fresh = [(s, q[0]) for s, q in enumerate(queues) if q and is_ready(s, q[0], num_stages, done)]
        if not fresh:
            return sum(map(len, queues)), tick
        for stage, action in fresh:
            queues[stage].pop(0)
            done.add((stage, action.phase, action.micro_batch))
    raise AssertionError


def is_ready(stage: int, action: Action, num_stages: int, done: set[tuple[int, Phase, int]]) -> bool:
    """A forward waits for the earlier stage's, a backward for the later stage's and for its own forward.

    The gradients of weights wait for those of their own inputs.
    """
    if action.phase is Phase.FORWARD:
        return stage == 0 or (stage - 1, Phase.FORWARD, action.micro_batch) in done
    if action.phase is Phase.WEIGHT_GRADIENT:
        return (stage, Phase.INPUT_GRADIENT, action.micro_batch) in done
    own = (stage, Phase.FORWARD, action.micro_batch) in done
    return own and (stage == num_stages - 1 or (stage + 1, action.phase, action.micro_batch) in done)


@given(SCHEDULES, st.integers(1, 6), st.integers(0, 9))
def test_no_stage_waits_for_ever(schedule: Schedule, num_stages: int, micro_batches: int) -> None:
    assert run_on_paper(schedule, num_stages, micro_batches)[0] == 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipelines_of_unequal_depth_and_count_all_finish(schedule: Schedule) -> None:
    # The paper's example: 64 micro-batches over pipelines of 29, 18 and 17; they meet in gradient sync only.
    for num_stages, micro_batches in ((4, 29), (3, 18), (2, 17)):
        left, ticks = run_on_paper(schedule, num_stages, micro_batches)
        assert left == 0
        assert ticks == 2 * (micro_batches + num_stages - 1)


def test_one_forward_one_backward_starts_backwards_early() -> None:
    kept = {s: [a.phase for a in actions(s, 0, 3, 5)].index(Phase.BACKWARD) for s in ("1f1b", "gpipe")}
    assert kept == {"1f1b": 3, "gpipe": 5}


def test_an_evaluation_goes_forward_only() -> None:
    assert [(a.phase, a.micro_batch) for a in forwards(2)] == [(Phase.FORWARD, 0), (Phase.FORWARD, 1)]


def test_what_was_sent_is_known_to_be_taken_when_something_comes_back_that_was_made_later() -> None:
    orders = tuple(actions("1f1b", stage, 3, 6) for stage in range(3))
    first, middle = takings(orders, 0), takings(orders, 1)
    assert orders[0][first[Action(Phase.FORWARD, 3), 1]] == Action(Phase.BACKWARD, 2)
    assert orders[1][middle[Action(Phase.BACKWARD, 1), 0]] == Action(Phase.FORWARD, 4)
    assert middle[Action(Phase.BACKWARD, 5), 0] == len(orders[1])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_a_stage_holds_messages_of_the_micro_batches_in_flight_and_one_more(schedule: Schedule) -> None:
    count, stages = 12, 4
    orders = tuple(actions(schedule, stage, stages, count) for stage in range(stages))
    for stage in range(stages):
        made = {action: number for number, action in enumerate(orders[stage])}
        taken = takings(orders, stage)
        neighbours = {phase: stage + phase.direction for phase in PHASES[schedule] if phase.direction}
        for phase, other in neighbours.items():
            if 0 <= other < stages:
                spans = [(made[a], taken[a, other]) for a in orders[stage] if a.phase is phase]
                held = max(sum(start <= now < stop for start, stop in spans) for now in range(len(orders[stage])))
                assert held <= min(count, (count if schedule == "gpipe" else stages - stage) + 1)


def test_messages_of_an_evaluation_are_held_to_its_end() -> None:
    orders = (forwards(3),) * 2
    assert set(takings(orders, 0).values()) == {3}
