import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetu_fx.planner.simulate.events import Activity, play
from hetu_fx.planner.values.device_memory import in_flight
from hetu_fx.plans.plan import Schedule
from hetu_fx.plans.schedule import (
    BACKWARD,
    FORWARD,
    PHASES,
    Action,
    Order,
    Passage,
    Phase,
    actions,
    arrivals,
    at_once,
    departures,
    forwards,
    stage_orders,
    takings,
)

UNCHUNKED: list[Schedule] = ["1f1b", "gpipe", "zero-bubble"]
SCHEDULES = st.sampled_from(UNCHUNKED)
IN_CHUNKS: list[Schedule] = ["interleaved", "zero-bubble"]
CHUNKED = st.sampled_from([*((one, 1) for one in UNCHUNKED), *itertools.product(IN_CHUNKS, (2, 3))])
WHOLE = [Phase.FORWARD, Phase.BACKWARD]
HALVES = [Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT]
LAST = Phase.BACKWARD, Phase.WEIGHT_GRADIENT
Chunked = tuple[Schedule, int]


@given(CHUNKED, st.integers(1, 6), st.integers(0, 8), st.data())
def test_every_chunk_of_every_micro_batch_goes_through_the_phases_once(
    chunked: Chunked, num_stages: int, micro_batches: int, data: st.DataObject
) -> None:
    (schedule, chunks), stage = chunked, data.draw(st.integers(0, num_stages - 1))
    order = actions(schedule, stage, num_stages, micro_batches, chunks)
    for number, chunk in itertools.product(range(micro_batches), range(chunks)):
        own = [a.phase for a in order if (a.micro_batch, a.chunk) == (number, chunk)]
        assert own in (WHOLE, HALVES)
        assert set(own) <= set(PHASES[schedule])
    for direction, chunk in itertools.product((1, -1), range(chunks)):
        passing = [a.micro_batch for a in order if (a.phase.direction, a.chunk) == (direction, chunk)]
        assert passing == list(range(micro_batches))
    halves = ([a.passage[1:] for a in order if a.phase is phase] for phase in HALVES[1:])
    assert next(halves) == next(halves)
    assert len(set(order)) == len(order)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_zero_bubble_is_one_forward_one_backward_but_for_weights(
    num_stages: int, micro_batches: int, chunks: int
) -> None:
    def without_weights(schedule: Schedule, stage: int) -> list[Passage]:
        order = actions(schedule, stage, num_stages, micro_batches, chunks)
        return [action.passage for action in order if action.phase.direction]

    for stage in range(num_stages):
        assert without_weights("zero-bubble", stage) == without_weights(_whole(chunks), stage)


def _whole(chunks: int) -> Schedule:
    """Return the schedule of which zero bubble cuts backwards."""
    return "interleaved" if chunks > 1 else "1f1b"


@given(st.integers(1, 7), st.integers(1, 16), st.integers(1, 3))
def test_zero_bubble_cuts_no_more_backwards_than_end_as_soon_as_if_all_were(
    stages: int, micro_batches: int, chunks: int
) -> None:
    # of chunks, where there are as many micro-batches as stages: with fewer, stages wait at both ends of each chunk
    assume(chunks == 1 or micro_batches >= stages)
    orders, all_cut = stage_orders("zero-bubble", stages, micro_batches, chunks), list[Order]()
    for stage in range(stages):
        all_cut.append(cut(actions(_whole(chunks), stage, stages, micro_batches, chunks), stage))
        num_cut = sum(action.phase is Phase.INPUT_GRADIENT for action in orders[stage])
        if micro_batches % stages == 0 or chunks == 1:
            assert num_cut == (min(micro_batches, stages) * chunks if stage else 0)
    assert played(orders, chunks) == pytest.approx(played(all_cut, chunks))


def cut(order: Order, stage: int) -> tuple[Action, ...]:
    """Cut all backwards: the weights' gradients of stage s come s backwards late (Qi et al., 2024)."""
    found, waiting = list[Action](), list[Action]()
    for action in order:
        halves = {Phase.BACKWARD: HALVES[1:]}.get(action.phase, [action.phase])
        now, *after = [replace(action, phase=phase) for phase in halves]
        found.append(now)
        waiting += after
        if len(waiting) > stage:
            found.append(waiting.pop(0))
    return (*found, *waiting)


def most_kept(order: Order) -> int:
    """Return how many chunks of micro-batches are between their first phase and their last, at most."""
    kept = most = 0
    for action in order:
        kept += (action.phase is Phase.FORWARD) - (action.phase in LAST)
        most = max(most, kept)
    return most


@given(SCHEDULES, st.integers(1, 6), st.integers(1, 8), st.data())
def test_the_memory_model_counts_what_the_schedule_keeps(
    schedule: Schedule, num_stages: int, micro_batches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, num_stages - 1))
    order = actions(schedule, stage, num_stages, micro_batches)
    assert most_kept(order) == in_flight(schedule, stage, num_stages, micro_batches)


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 4))
def test_chunks_warm_up_as_in_megatron(num_stages: int, chunks: int, rounds: int) -> None:
    # schedules.py of Megatron-LM: (p - rank - 1) * 2 + (chunks - 1) * p forwards come before the first pair
    micro_batches = rounds * num_stages
    for stage, order in enumerate(stage_orders("interleaved", num_stages, micro_batches, chunks)):
        warm_up = min(micro_batches * chunks, 2 * (num_stages - stage - 1) + (chunks - 1) * num_stages)
        first = min(warm_up + 1, micro_batches * chunks)
        assert [a.phase for a in order].index(Phase.BACKWARD) == first
        assert most_kept(order) == first
        turns = [(a.micro_batch // num_stages, a.chunk) for a in order if a.phase is Phase.FORWARD]
        assert turns == sorted(turns)
        turns = [(a.micro_batch // num_stages, -a.chunk) for a in order if a.phase is Phase.BACKWARD]
        assert turns == sorted(turns)


@pytest.mark.parametrize(("micro_batches", "sizes"), [(3, [3]), (4, [4]), (7, [7]), (9, [5, 4]), (14, [5, 5, 4])])
def test_rounds_have_as_many_micro_batches_as_there_are_stages_or_more(micro_batches: int, sizes: list[int]) -> None:
    runs = [
        (chunk, len(list(run))) for chunk, run in itertools.groupby(forwards(micro_batches, 4, 2), lambda a: a.chunk)
    ]
    assert runs == [(chunk, size) for size in sizes for chunk in range(2)]


Done = set[tuple[int, int, int]]
"""What is done: (part of the pipeline, direction, micro-batch)."""


def run_on_paper(schedule: Schedule, num_stages: int, micro_batches: int, chunks: int = 1) -> tuple[int, int]:
    """Run all stages side by side, each action when its neighbour's value is there; one action takes one tick.

    Returns (actions left over when nobody can go on, ticks).
    """
    queues = [list(order) for order in stage_orders(schedule, num_stages, micro_batches, chunks)]
    done: Done = set()
    for tick in itertools.count():
        parts = [(s, q[0].chunk * num_stages + s, q[0]) for s, q in enumerate(queues) if q]
        fresh = [one for one in parts if is_ready(*one[1:], num_stages * chunks, done)]
        if not fresh:
            return sum(map(len, queues)), tick
        for stage, part, action in fresh:
            queues[stage].pop(0)
            done.add((part, action.phase.direction, action.micro_batch))
    raise AssertionError


def is_ready(part: int, action: Action, num_parts: int, done: Done) -> bool:
    """A forward waits for the earlier part's, a backward for the later part's and for its own forward.

    The gradients of weights wait for those of their own inputs.
    """
    if action.phase is Phase.FORWARD:
        return part == 0 or (part - 1, FORWARD, action.micro_batch) in done
    if action.phase is Phase.WEIGHT_GRADIENT:
        return (part, BACKWARD, action.micro_batch) in done
    own = (part, FORWARD, action.micro_batch) in done
    return own and (part == num_parts - 1 or (part + 1, BACKWARD, action.micro_batch) in done)


@given(CHUNKED, st.integers(1, 6), st.integers(0, 14))
def test_no_stage_waits_for_ever(chunked: Chunked, num_stages: int, micro_batches: int) -> None:
    schedule, chunks = chunked
    assert run_on_paper(schedule, num_stages, micro_batches, chunks)[0] == 0


@given(CHUNKED, st.integers(1, 5), st.integers(1, 12))
def test_what_leaves_first_is_waited_for_first(chunked: Chunked, num_stages: int, micro_batches: int) -> None:
    schedule, chunks = chunked
    orders = stage_orders(schedule, num_stages, micro_batches, chunks)
    for stage in range(num_stages):
        wanted = arrivals(orders, stage)
        for leaves in (departures(orders, stage), at_once(orders, stage)):
            assert leaves.keys() == wanted.keys()
            for other in range(num_stages):
                pairs = sorted((call, wanted[key]) for key, call in leaves.items() if key[1] % num_stages == other)
                assert [place for _, place in pairs] == sorted(place for _, place in pairs)


@given(CHUNKED, st.integers(2, 5), st.integers(1, 12))
def test_what_need_not_wait_for_its_receiver_leaves_no_later(
    chunked: Chunked, num_stages: int, micro_batches: int
) -> None:
    schedule, chunks = chunked
    orders = stage_orders(schedule, num_stages, micro_batches, chunks)
    for stage, order in enumerate(orders):
        soon, late = at_once(orders, stage), departures(orders, stage)
        made = {action.passage: number for number, action in enumerate(order)}
        assert all(made[passage] < soon[passage, other] <= late[passage, other] for passage, other in late)
        if schedule == "1f1b":
            nearest = [(passage, other) for passage, other in late if abs(other - stage) == 1]
            assert [soon[key] for key in nearest] == [late[key] for key in nearest]


SECONDS = {Phase.FORWARD: 1.0, Phase.BACKWARD: 2.0, Phase.INPUT_GRADIENT: 1.0, Phase.WEIGHT_GRADIENT: 1.0}


def seconds_of(schedule: Schedule, num_stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Play a schedule whose forwards take a second per stage, backwards two; nothing is sent."""
    return played(stage_orders(schedule, num_stages, micro_batches, chunks), chunks)


def played(rows: Sequence[Order], chunks: int = 1) -> float:
    """Play what stages do in order; each action in a chunk takes its part of a stage's."""
    num_stages = len(rows)
    numbers = {(s, one.passage): i for i, (s, one) in enumerate((s, one) for s, row in enumerate(rows) for one in row)}

    def needs(stage: int, action: Action) -> list[int]:
        part = action.chunk * num_stages + stage
        other = part - 1 if action.phase is Phase.FORWARD else part + 1
        if action.phase is Phase.WEIGHT_GRADIENT:
            return [numbers[stage, (BACKWARD, action.micro_batch, action.chunk)]]
        if other == num_stages * chunks:
            return [numbers[stage, (FORWARD, action.micro_batch, action.chunk)]]
        chunk, owner = divmod(other, num_stages)
        return [numbers[owner, (action.phase.direction, action.micro_batch, chunk)]] if other >= 0 else []

    activities = []
    for stage, row in enumerate(rows):
        for index, action in enumerate(row):
            before = [numbers[stage, row[index - 1].passage]] if index else []
            uses = {("compute", stage): 1.0}
            activities.append(Activity(SECONDS[action.phase] / chunks, uses, (*before, *needs(stage, action))))
    return max(times.end for times in play(activities))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (4, 4), (4, 9), (8, 16)])
def test_equal_stages_take_m_plus_p_minus_1_times_their_time(
    schedule: Schedule, stages: int, micro_batches: int
) -> None:
    assert seconds_of(schedule, stages, micro_batches) == (micro_batches + stages - 1) * 3


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 16)])
def test_chunks_divide_the_bubble(chunks: int, stages: int, micro_batches: int) -> None:
    # Narayanan et al. (2021), section 2.2.2: the bubble is (p - 1) / (v m) of the ideal time
    expected = micro_batches * 3 * (1 + (stages - 1) / (chunks * micro_batches))
    assert seconds_of("interleaved", stages, micro_batches, chunks) == pytest.approx(expected)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (3, 4), (4, 4), (4, 16), (8, 8)])
def test_weight_gradients_fill_the_bubble(stages: int, micro_batches: int) -> None:
    # Qi et al. (2024), table 1: the bubble of ZB-H1 is (p - 1)(T_F + T_B - T_W)
    assert seconds_of("zero-bubble", stages, micro_batches) == micro_batches * 3 + (stages - 1)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (8, 16)])
def test_weight_gradients_fill_what_chunks_leave_of_the_bubble(chunks: int, stages: int, micro_batches: int) -> None:
    expected = micro_batches * 3 + (stages - 1) / chunks
    assert seconds_of("zero-bubble", stages, micro_batches, chunks) == pytest.approx(expected)


@given(st.integers(1, 6), st.integers(2, 3), st.integers(1, 4))
def test_in_chunks_zero_bubble_keeps_no_more_than_the_first_stage_does_without(
    stages: int, chunks: int, rounds: int
) -> None:
    most = most_kept(actions("interleaved", 0, stages, rounds * stages, chunks))
    orders = stage_orders("zero-bubble", stages, rounds * stages, chunks)
    assert most_kept(orders[0]) == most
    assert max(map(most_kept, orders)) <= most


@given(st.integers(1, 6), st.integers(1, 12))
def test_zero_bubble_keeps_no_more_micro_batches_than_1f1b_does_at_most(stages: int, micro_batches: int) -> None:
    for order in stage_orders("zero-bubble", stages, micro_batches):
        assert most_kept(order) <= min(stages, micro_batches)


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
    assert orders[0][first[(FORWARD, 3, 0), 1]] == Action(Phase.BACKWARD, 2)
    assert orders[1][middle[(BACKWARD, 1, 0), 0]] == Action(Phase.FORWARD, 4)
    assert middle[(BACKWARD, 5, 0), 0] == len(orders[1])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_a_stage_holds_messages_of_the_micro_batches_in_flight_and_one_more(schedule: Schedule) -> None:
    count, stages = 12, 4
    orders = tuple(actions(schedule, stage, stages, count) for stage in range(stages))
    for stage in range(stages):
        made = {action: number for number, action in enumerate(orders[stage])}
        taken = takings(orders, stage)
        for direction in (FORWARD, BACKWARD):
            if 0 <= (other := stage + direction) < stages:
                spans = [(made[a], taken[a.passage, other]) for a in orders[stage] if a.phase.direction == direction]
                held = max(sum(start <= now < stop for start, stop in spans) for now in range(len(orders[stage])))
                assert held <= min(count, (count if schedule == "gpipe" else stages - stage) + 1)


@given(st.sampled_from(IN_CHUNKS), st.integers(2, 5), st.integers(2, 3), st.integers(1, 6))
def test_with_chunks_messages_are_held_for_what_is_in_flight_and_a_round_more(
    schedule: Schedule, num_stages: int, chunks: int, rounds: int
) -> None:
    orders = stage_orders(schedule, num_stages, rounds * num_stages, chunks)
    for stage, order in enumerate(orders):
        made = {action.passage: number for number, action in enumerate(order)}
        spans: dict[int, list[tuple[int, int]]] = {}
        for (passage, other), taken in takings(orders, stage).items():
            direction, _, chunk = passage
            if abs(other - chunk * num_stages - stage) == 1:
                spans.setdefault(direction, []).append((made[passage], taken))
        for own in spans.values():
            held = Counter(now for start, stop in own for now in range(start, stop))
            assert max(held.values()) <= most_kept(order) + chunks * num_stages


def test_messages_of_an_evaluation_are_held_to_its_end() -> None:
    orders = (forwards(3),) * 2
    assert set(takings(orders, 0).values()) == {3}
