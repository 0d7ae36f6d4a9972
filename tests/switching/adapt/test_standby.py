"""Devices without work: what their probes tell, from plain values."""

from __future__ import annotations

import pytest

from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.switching.adapt.health import PROBE_SECONDS, PROBE_SHARE, Baselines, Standby


class Told:
    """A probe that says what it is told to, and notes how long it may take."""

    def __init__(self) -> None:
        self.next, self.budgets = 1.0, list[float]()

    def seconds(self, budget_seconds: float) -> float:
        self.budgets.append(budget_seconds)
        return self.next


def facts(*probes: float, computed: float = 0.0) -> StepFacts:
    return StepFacts((1,) * len(probes), 0, (), (0.0, computed), probe_seconds=probes)


def test_slowness_is_told_against_the_median_of_the_first_probes() -> None:
    baselines = Baselines(3)
    for seconds in (2.0, 9.0, 2.2):
        assert baselines.slowness({0: seconds}, []) == {}
        baselines.take({0: seconds})
    baselines.take({0: 100.0})
    assert baselines.slowness({0: 4.4}, []) == {0: pytest.approx(2.0)}


def test_devices_that_have_work_are_told_by_it() -> None:
    baselines = Baselines(1)
    baselines.take({0: 1.0, 1: 1.0})
    assert baselines.slowness({0: 3.0, 1: 3.0}, [0]) == {1: 3.0}


def test_a_device_that_ran_no_probe_is_not_judged() -> None:
    baselines = Baselines(1)
    baselines.take({0: 1.0, 1: 0.0})
    assert not baselines.is_known(1)
    assert baselines.slowness({0: 0.0, 1: 5.0}, []) == {}


def test_a_rank_runs_its_first_probes_by_itself_and_later_ones_when_it_stands_by() -> None:
    probe = Told()
    standby = Standby(0, probe, 2)  # type: ignore[arg-type]
    told = [standby.told_seconds()]
    for _ in range(4):
        standby.observe(facts(told[-1], 1.0), working=[0, 1])
        told.append(standby.told_seconds())
    assert told == [0.0, 1.0, 1.0, 0.0, 0.0]
    probe.next = 5.0
    standby.run()
    assert standby.told_seconds() == 5.0
    assert standby.observe(facts(5.0, 0.0), working=[1]) == {0: 5.0}


def test_a_device_that_is_alone_runs_no_probe() -> None:
    probe = Told()
    standby = Standby(0, probe, 2)  # type: ignore[arg-type]
    standby.observe(facts(0.0), working=[0])
    assert probe.budgets == []


def test_a_probe_takes_a_share_of_what_was_computed_longest_at_most() -> None:
    probe = Told()
    standby = Standby(0, probe, 0)  # type: ignore[arg-type]
    for seconds in (0.2, 100.0):
        standby.observe(facts(1.0, 1.0, computed=seconds), working=[0, 1])
        standby.run()
    assert probe.budgets == [0.2 * PROBE_SHARE, PROBE_SECONDS]
