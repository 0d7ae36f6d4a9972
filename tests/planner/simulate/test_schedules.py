import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.errors import PlanError
from hetu_fx.planner.simulate.events import Activity, play
from hetu_fx.planner.simulate.schedules import Interleaved, PaperSchedule, num_chunks, table
from hetu_fx.plans.schedule import Action, Phase

SECONDS = {Phase.FORWARD: 1.0, Phase.BACKWARD: 2.0, Phase.INPUT_GRADIENT: 1.0, Phase.WEIGHT_GRADIENT: 1.0}
ALL = [*("1f1b", "gpipe"), Interleaved(2), Interleaved(3), "zero-bubble"]


def seconds_of(schedule: PaperSchedule, num_devices: int, micro_batches: int) -> float:
    """Play a schedule whose forwards take a second per device, backwards two; nothing is sent."""
    chunks, rows = num_chunks(schedule), table(schedule, num_devices, micro_batches)
    numbers = {(d, entry): i for i, (d, entry) in enumerate((d, e) for d, row in enumerate(rows) for e in row)}

    def needs(device: int, entry: Action) -> list[int]:
        part = entry.chunk * num_devices + device
        other = part - 1 if entry.phase is Phase.FORWARD else part + 1
        if entry.phase is Phase.WEIGHT_GRADIENT:
            return [numbers[device, Action(Phase.INPUT_GRADIENT, entry.micro_batch, entry.chunk)]]
        if other == num_devices * chunks:
            return [numbers[device, Action(Phase.FORWARD, entry.micro_batch, entry.chunk)]]
        chunk, owner = divmod(other, num_devices)
        return [numbers[owner, Action(entry.phase, entry.micro_batch, chunk)]] if other >= 0 else []

    activities = []
    for device, row in enumerate(rows):
        for index, entry in enumerate(row):
            before = [numbers[device, row[index - 1]]] if index else []
            uses = {("compute", device): 1.0}
            activities.append(Activity(SECONDS[entry.phase] / chunks, uses, (*before, *needs(device, entry))))
    return max(times.end for times in play(activities))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("devices", "micro_batches"), [(1, 3), (2, 1), (4, 4), (4, 9), (8, 16)])
def test_equal_stages_take_m_plus_p_minus_1_times_their_time(
    schedule: PaperSchedule, devices: int, micro_batches: int
) -> None:
    assert seconds_of(schedule, devices, micro_batches) == (micro_batches + devices - 1) * 3


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 16)])
def test_chunks_divide_the_bubble(chunks: int, devices: int, micro_batches: int) -> None:
    # Narayanan et al. (2021), section 2.2.2: the bubble is (p - 1) / (v m) of the ideal time
    ideal = micro_batches * 3
    expected = ideal * (1 + (devices - 1) / (chunks * micro_batches))
    assert seconds_of(Interleaved(chunks), devices, micro_batches) == pytest.approx(expected)


@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 2), (3, 4), (4, 4), (4, 16), (8, 8)])
def test_weight_gradients_fill_the_bubble(devices: int, micro_batches: int) -> None:
    # Qi et al. (2024), table 1: the bubble of ZB-H1 is (p - 1)(T_F + T_B - T_W)
    assert seconds_of("zero-bubble", devices, micro_batches) == micro_batches * 3 + (devices - 1)


@given(st.sampled_from(ALL), st.integers(1, 5), st.integers(1, 4))
def test_every_chunk_of_every_micro_batch_is_done_once(schedule: PaperSchedule, devices: int, rounds: int) -> None:
    micro_batches = rounds * devices
    for row in table(schedule, devices, micro_batches):
        assert len(set(row)) == len(row)
        forwards = {(e.micro_batch, e.chunk) for e in row if e.phase is Phase.FORWARD}
        assert len(forwards) == micro_batches * num_chunks(schedule)
        whole = {(e.micro_batch, e.chunk) for e in row if e.phase is Phase.BACKWARD}
        halves = [{(e.micro_batch, e.chunk) for e in row if e.phase is w} for w in list(Phase)[2:]]
        assert whole == forwards or (not whole and halves == [forwards, forwards])


@given(st.integers(1, 6), st.integers(1, 12))
def test_zero_bubble_keeps_no_more_micro_batches_than_1f1b_does_at_most(devices: int, micro_batches: int) -> None:
    for row in table("zero-bubble", devices, micro_batches):
        kept = most = 0
        for entry in row:
            kept += {Phase.FORWARD: 1, Phase.WEIGHT_GRADIENT: -1}.get(entry.phase, 0)
            most = max(most, kept)
        assert most <= min(devices, micro_batches)


def test_interleaving_needs_whole_rounds_and_chunks() -> None:
    with pytest.raises(PlanError, match="give a multiple of 4"):
        table(Interleaved(2), 4, 6)
    with pytest.raises(PlanError, match="1 chunks per device; give 2 or more"):
        Interleaved(1)
