"""A rank's own time: what communication waited is left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetu_fx.comm_ops.wire import groups
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.switching.step import timer as module
from hetu_fx.switching.step.timer import ComputeTimer, HostTime
from tests.switching.clocks import Ahead


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


@pytest.fixture
def table() -> Iterator[GroupTable]:
    with using(GroupTable.dry(0, 2)) as table:
        yield table


def test_the_hosts_own_time_is_without_the_models_ops_and_without_waiting(
    clock: Clock, table: GroupTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "perf_counter", clock)
    host = HostTime(lambda: table.waited_seconds)
    timer = ComputeTimer(host=host)
    with host.counted():
        clock.now += 1
        with timer:
            clock.now += 10
            with table.waiting("all-reduce inside the model"):
                clock.now += 100
        with table.waiting("all-reduce"):
            clock.now += 1000
            with table.waiting("group creation"):
                clock.now += 10000
        clock.now += 2
    assert host.seconds == 3


def test_waiting_for_others_is_left_out(clock: Clock, table: GroupTable) -> None:
    timer = ComputeTimer()
    with timer:
        clock.now += 5
        with table.waiting("all-reduce"):
            clock.now += 3
        clock.now += 1
    assert timer.seconds == 6


def test_waiting_inside_waiting_is_left_out_once(clock: Clock, table: GroupTable) -> None:
    timer = ComputeTimer()
    with timer, table.waiting("all-reduce"):
        with table.waiting("group creation"):
            clock.now += 3
        clock.now += 2
    assert timer.seconds == 0


def test_several_spans_add_up_and_what_is_between_does_not(clock: Clock, table: GroupTable) -> None:
    timer = ComputeTimer()
    for _ in range(2):
        with timer:
            clock.now += 1
        with table.waiting("all-reduce"):
            clock.now += 10
    assert timer.seconds == 2


def test_what_is_started_twice_goes_on_until_it_is_stopped_twice(clock: Clock, table: GroupTable) -> None:
    timer = ComputeTimer()
    for act in (timer.start, timer.start, timer.stop, timer.stop):
        act()
        clock.now += 1
    assert timer.seconds == 3


def test_stopping_twice_counts_once(clock: Clock, table: GroupTable) -> None:
    timer = ComputeTimer()
    timer.stop()
    timer.start()
    clock.now += 4
    timer.stop()
    clock.now += 4
    timer.stop()
    assert timer.seconds == 4


def test_a_span_that_fails_is_counted_too(clock: Clock, table: GroupTable) -> None:
    def fail(timer: ComputeTimer) -> None:
        with timer:
            clock.now += 1
            raise KeyError

    timer = ComputeTimer()
    with pytest.raises(KeyError):
        fail(timer)
    assert timer.seconds == 1


def test_whether_the_time_is_known_is_told_without_waiting_for_the_device(table: GroupTable) -> None:
    events = Ahead()
    timer = ComputeTimer(events)
    assert timer.is_known
    with timer:
        pass
    assert not timer.is_known
    events.has_come = True
    assert timer.is_known
    assert events.waits == 0
    assert timer.seconds == 1.0
