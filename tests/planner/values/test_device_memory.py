from dataclasses import replace

import pytest

from hetu_fx.comm_ops.plans.cost import BUCKET_BYTES
from hetu_fx.planner.values.device_memory import UNBOUNDED, HeldShard, fixed_bytes, in_flight, instants, most_rows, peak
from hetu_fx.planner.values.footprint import StageFootprint
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.state import ParameterState

PRINT = StageFootprint(Line(0, 10), (Line(0, 12),), (Line(5, 14),), (Line(0, 15),), largest=8)
ALONE = HeldShard(parameters=100, owned=100, copied=0, synced=0, footprint=PRINT)
SPREAD = HeldShard(parameters=100, owned=25, copied=100, synced=100, footprint=PRINT)


def total(shard: HeldShard, rows: int, num_in_flight: int = 1, micro_batches: int = 1) -> dict[str, int]:
    """Return the bytes of all terms at each instant, the largest where there are several of a name."""
    found: dict[str, int] = {}
    for instant in instants(shard, num_in_flight, micro_batches):
        found[instant.name] = max(found.get(instant.name, 0), sum(count for _, count in instant.at(rows)))
    return found


def test_1f1b_keeps_fewer_micro_batches_towards_the_end() -> None:
    assert [in_flight("1f1b", stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight("1f1b", 0, 4, 2) == 2
    assert [in_flight("gpipe", stage, 4, 8) for stage in range(4)] == [8, 8, 8, 8]


@pytest.mark.parametrize(("zero", "num_replicas", "optimizer"), [(0, 1, 200), (0, 4, 200), (1, 1, 200), (1, 4, 75)])
def test_zero_spreads_states_over_replicas(zero: int, num_replicas: int, optimizer: int) -> None:
    terms = dict(fixed_bytes(100.0, zero=zero, num_replicas=num_replicas))
    assert terms == {"parameters": 100, "gradients": 100, "optimizer": optimizer}


def test_a_device_alone_copies_and_sends_nothing() -> None:
    # parameters and two moments; then what a micro-batch holds; then gradients, and three values of the largest
    assert total(ALONE, 2) == {
        "gather": 300,
        "synchronisation": 400,
        "update": 300 + 100 + 3 * 8,
        "forward": 300 + 24,
        "first backward": 300 + 5 + 28,
    }


def test_replicas_hold_copies_their_messages_and_what_arrives() -> None:
    lasting = 25 + 50 + 100
    found = total(SPREAD, 0)
    assert found["gather"] == lasting + 100
    assert found["synchronisation"] == lasting + 100 + 100 + 75
    assert found["update"] == lasting + 25 + 3 * 2


def test_an_update_by_lists_holds_a_value_of_all_that_is_at_home() -> None:
    by_lists = replace(SPREAD, state=ParameterState(by_lists=True))
    assert total(by_lists, 0)["update"] == 25 + 50 + 100 + 25 + 25
    largest = replace(by_lists, footprint=replace(PRINT, largest=80))  # one after another, three values of 20 bytes
    assert total(largest, 0)["update"] == 25 + 50 + 100 + 25 + 3 * 20


def test_gathers_hold_no_more_messages_than_travel_at_once() -> None:
    size = 10 * BUCKET_BYTES
    shard = HeldShard(parameters=size, owned=0, copied=size, synced=size, footprint=PRINT)
    assert total(shard, 0)["gather"] == size + 3 * BUCKET_BYTES


def test_buckets_take_the_place_of_the_gradients_that_are_packed_into_them() -> None:
    size = 10 * BUCKET_BYTES
    shard = HeldShard(parameters=size, owned=size // 4, copied=size, synced=size, footprint=PRINT)
    lasting = size // 4 + size // 2 + size
    assert total(shard, 0)["synchronisation"] == lasting + size + BUCKET_BYTES + BUCKET_BYTES * 3 // 4


def test_gradients_that_go_as_they_come_leave_what_stays_at_home_and_a_few_buckets() -> None:
    size = 10 * BUCKET_BYTES
    shard = HeldShard(parameters=size, owned=size // 4, copied=size, synced=size, footprint=PRINT, lets_go=True)
    lasting = size // 4 * 3 + size
    # three packed buckets, and the oldest one's own quarter with those of the other three quarters that arrive
    assert total(shard, 0)["synchronisation"] == lasting + 7 * BUCKET_BYTES // 4 + 3 * BUCKET_BYTES + BUCKET_BYTES
    assert shard.going(size) == 7 * BUCKET_BYTES / 4 + 3 * BUCKET_BYTES


def test_units_that_are_gathered_one_by_one_are_in_memory_before_they_are() -> None:
    shard = HeldShard(parameters=100, owned=25, copied=20, synced=100, footprint=PRINT, lets_go=True, unit=10)
    found = total(shard, 0)
    assert found["gather"] == 25 + 50 + 20 + 20
    assert found["update"] == 25 + 50 + 20 + 25 + 3 * 2


def test_micro_batches_in_flight_add_up() -> None:
    few, many = total(ALONE, 1, num_in_flight=2, micro_batches=4), total(ALONE, 1, num_in_flight=4, micro_batches=4)
    assert few["forward"] == 300 + 10 + 12 + 100  # a backward has been before
    assert many["forward"] == 300 + 3 * 10 + 12
    assert few["later backward"] == 300 + 10 + 15 + 100
    assert many["later backward"] == 300 + 2 * 10 + 15 + 100


@pytest.mark.parametrize("shard", [ALONE, SPREAD])
def test_most_rows_fill_what_is_left(shard: HeldShard) -> None:
    found = list(instants(shard, 3, 6))
    rows = most_rows(1000, shard, 3, 6)
    assert rows > 0
    held = [sum(count for _, count in peak(found, n)) for n in (rows, rows + 1)]
    assert held[0] <= 1000 < held[1]


def test_rows_have_no_limit_where_they_hold_nothing_and_none_fit_where_states_do_not() -> None:
    empty = StageFootprint(Line(), (), (), ())
    shard = HeldShard(100, 100, 0, 0, empty)
    assert most_rows(400, shard, 1, 1) == UNBOUNDED
    assert most_rows(399, shard, 1, 1) == 0
