import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.errors import StateError
from hetu_fx.switching.adapt.health import REMEMBERED, HealthTracker


def feed(tracker: HealthTracker, costs: Iterable[float], rank: int = 0) -> list[dict[int, float]]:
    """Feed seconds per unit of one rank; return what was reported on the way."""
    reports = []
    for cost in costs:
        tracker.observe({rank: cost * 3}, {rank: 3.0})
        if (report := tracker.changed()) is not None:
            reports.append(report)
    return reports


def settled(tracker: HealthTracker, ranks: Iterable[int]) -> HealthTracker:
    """Let devices have taken a second per unit of work for so long that this is their normal."""
    for rank in ranks:
        tracker._device(rank).first = [1.0] * tracker.settling
    return tracker


def test_a_lasting_slowdown_is_reported_once_with_its_rate() -> None:
    tracker = HealthTracker()
    assert feed(tracker, [1.0] * 10) == []
    assert feed(tracker, [2.0] * 10) == [{0: 2.0}]
    assert tracker.rates == {0: 2.0}


def test_normals_are_known_when_all_devices_have_been_seen_for_long_enough() -> None:
    tracker = HealthTracker(window=2, lasting=3)
    for seconds in ({0: 9.0}, {0: 2.0, 1: 3.0}, {0: 2.0, 1: 3.0}):
        tracker.observe(seconds, {0: 1.0, 1: 2.0})
        assert tracker.normals == {}
    tracker.observe({1: 3.2}, {0: 1.0, 1: 2.0})
    assert tracker.normals == {0: 2.0, 1: 1.5}


def test_a_normal_that_the_first_steps_tell_badly_is_told_by_later_ones() -> None:
    tracker = HealthTracker(window=3, lasting=9, settling=9)
    for cost in (1.2, 1.2, 1.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.9, 0.9):
        tracker.observe({0: 1.0, 1: cost}, {0: 1.0, 1: 1.0})
    assert tracker.normals == {0: 1.0, 1: 1.0}


def test_what_may_be_slowness_is_no_part_of_a_normal() -> None:
    tracker = HealthTracker(window=3, lasting=8, settling=8)
    for cost in (1.0, 1.0, 1.0, 3.0, 1.0, 3.0, 1.0, 1.0, 3.0, 1.0, 3.0, 1.0):
        tracker.observe({0: 1.0, 1: cost}, {0: 1.0, 1: 1.0})
    assert tracker.rates == {0: 1.0, 1: 1.0}
    assert tracker.normals == {0: 1.0, 1: 1.0}


def test_another_unit_of_work_changes_no_rate() -> None:
    tracker = HealthTracker(window=3, patience=1)
    feed(tracker, [1.0] * 6)
    tracker.rescale({0: 4.0})
    assert feed(tracker, [4.0] * 6) == []
    assert feed(tracker, [8.0] * 3) == [{0: 2.0}]


def test_a_single_slow_step_is_noise() -> None:
    assert feed(HealthTracker(), [1.0] * 8 + [9.0, 9.0] + [1.0] * 8) == []


def test_a_shift_shows_after_half_the_window_and_the_patience() -> None:
    tracker = HealthTracker(window=5, patience=2)
    feed(tracker, [1.0] * 10)
    assert feed(tracker, [2.0] * 3) == []
    assert feed(tracker, [2.0]) == [{0: 2.0}]


def test_a_returning_device_is_healthy_again() -> None:
    tracker = HealthTracker()
    feed(tracker, [1.0] * 5 + [3.0] * 8)
    assert feed(tracker, [1.0] * 8) == [{0: 1.0}]


def test_a_device_at_the_edge_does_not_flap() -> None:
    tracker = HealthTracker(window=1, patience=1, threshold=0.2, hysteresis=0.1)
    feed(tracker, [1.0])
    assert feed(tracker, [1.25]) == [{0: 1.25}]
    assert feed(tracker, [1.15, 1.25, 1.11, 1.2]) == []
    assert feed(tracker, [1.05]) == [{0: 1.0}]


def test_a_slow_device_that_gets_slower_is_reported_again() -> None:
    tracker = HealthTracker(window=1, patience=1)
    feed(tracker, [1.0, 2.0])
    assert feed(tracker, [2.3]) == []
    assert feed(tracker, [4.0]) == [{0: 4.0}]


def test_a_rate_that_few_steps_have_told_is_refined_by_those_that_follow() -> None:
    tracker = HealthTracker(window=3, lasting=9, patience=1, gap=0.09)
    feed(tracker, [1.0] * 4)
    assert feed(tracker, [3.6, 3.3, 3.3]) == [{0: 3.3}]
    assert feed(tracker, [3.0] * 7) == []
    assert tracker.rates == {0: 3.3}
    assert feed(tracker, [3.0]) == [{0: 3.0}], "by a tenth: it is worth another plan"
    assert feed(tracker, [3.1] * 20) == [], "by less than a tenth: it is not"
    assert tracker.rates == {0: 3.067}, "the mean of three times nine steps"
    feed(tracker, [3.1] * 9 * (REMEMBERED - 1))
    assert tracker.rates == {0: 3.1}


def test_what_a_rate_was_before_a_shift_does_not_count_for_the_one_after() -> None:
    tracker = HealthTracker(window=3, lasting=9, patience=1)
    feed(tracker, [1.0] * 4 + [2.0] * 40)
    assert feed(tracker, [4.0] * 20) == [{0: 4.0}]
    assert tracker.rates == {0: 4.0}


def test_a_rate_is_refined_anew_where_work_is_shared_out_otherwise() -> None:
    tracker = HealthTracker(window=2, lasting=8, patience=1, gap=0.05)
    feed(tracker, [1.0] * 3 + [2.0] * 6)
    tracker.refine_anew()
    for known in (2.0,) * 7 + (2.08,):
        assert feed(tracker, [2.08]) == []
        assert tracker.rates == {0: known}


def test_a_rate_is_refined_by_the_steps_in_which_all_were_measured() -> None:
    tracker = settled(HealthTracker(window=2, lasting=3, patience=1, gap=0.1), range(2))
    for length in (1.0, 1.0, 1.0):
        tracker.observe({0: length, 1: 2 * length}, {0: 1.0, 1: 1.0})
    tracker.observe({1: 8.0}, {0: 1.0, 1: 1.0})
    for _ in range(3):
        tracker.observe({0: 4.0, 1: 8.4}, {0: 1.0, 1: 1.0})
    assert tracker.rates == {0: 1.0, 1: 2.1}


def test_slow_devices_are_not_judged_by_each_other_while_the_healthy_one_is_not_measured() -> None:
    work = dict.fromkeys(range(3), 1.0)
    tracker = settled(HealthTracker(window=3, lasting=3, patience=1), range(3))
    for _ in range(3):
        tracker.observe({0: 1.0, 1: 3.0, 2: 2.0}, work)
    assert tracker.changed() == {0: 1.0, 1: 3.0, 2: 2.0}
    for _ in range(6):
        tracker.observe({1: 3.0, 2: 2.0}, work)
    assert tracker.changed() is None
    assert tracker.rates == {0: 1.0, 1: 3.0, 2: 2.0}
    for _ in range(3):
        tracker.observe({0: 1.0, 1: 3.0, 2: 1.0}, work)
    assert tracker.changed() == {0: 1.0, 1: 3.0, 2: 1.0}


def test_a_rate_is_told_over_the_mean_of_the_healthy_devices() -> None:
    tracker = settled(HealthTracker(window=3, patience=1), range(4))
    for _ in range(3):
        tracker.observe({0: 0.9, 1: 1.0, 2: 1.1, 3: 3.0}, dict.fromkeys(range(4), 1.0))
    assert tracker.rates == {0: 1.0, 1: 1.0, 2: 1.0, 3: 3.0}


@settings(max_examples=100)
@given(st.lists(st.tuples(*[st.floats(0.95, 1.05)] * 3), min_size=30, max_size=60))
def test_noise_of_five_percent_never_triggers(noise: list[tuple[float, ...]]) -> None:
    tracker = HealthTracker()
    for step in noise:
        tracker.observe(dict(enumerate(step)), dict.fromkeys(range(3), 1.0))
    assert tracker.changed() is None


@settings(max_examples=100)
@given(st.floats(1.5, 20.0), st.lists(st.floats(0.98, 1.02), min_size=40, max_size=40))
def test_an_injected_rate_is_found_within_the_noise(rate: float, noise: list[float]) -> None:
    tracker = HealthTracker()
    costs = [n * (rate if step >= 20 else 1.0) for step, n in enumerate(noise)]
    for report in feed(tracker, costs):
        assert report[0] == pytest.approx(rate, rel=0.07)
    assert tracker.rates[0] == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize("seed", range(10))
def test_an_injected_rate_is_known_within_three_percent_in_the_end(seed: int) -> None:
    tracker, noise, work = HealthTracker(), random.Random(seed), {0: 41.0, 1: 13.0, 2: 18.0}
    injected = {0: 1.0, 1: noise.uniform(1.5, 8.0), 2: noise.uniform(1.5, 8.0)}
    for step in range(40 + REMEMBERED * tracker.lasting):
        rates = injected if step >= 30 else dict.fromkeys(work, 1.0)
        tracker.observe({rank: work[rank] * rate * noise.gauss(1.0, 0.03) for rank, rate in rates.items()}, work)
    assert tracker.rates == pytest.approx(injected, rel=0.03)


def test_what_slows_everybody_is_no_straggler() -> None:
    tracker = HealthTracker(window=3, patience=1)
    for length in [1.0] * 6 + [4.0, 1.0, 4.0] * 4:
        tracker.observe({0: 2 * length, 1: 3 * length}, {0: 1.0, 1: 1.0})
    assert tracker.changed() is None
    for length in [4.0] * 3:
        tracker.observe({0: 2 * length, 1: 6 * length}, {0: 1.0, 1: 1.0})
    assert tracker.changed() == {0: 1.0, 1: 2.0}


def test_a_device_that_was_not_measured_for_a_step_begins_a_new_window() -> None:
    tracker = HealthTracker(window=3, patience=1)
    for length in (1.0, 1.0, 1.0, 1.0, 1.0):
        tracker.observe({0: length, 1: length}, {0: 1.0, 1: 1.0})
    tracker.observe({1: 4.0}, {0: 1.0, 1: 1.0})
    for _ in range(3):
        tracker.observe({0: 4.0, 1: 4.0}, {0: 1.0, 1: 1.0})
    assert tracker.changed() is None, "steps of 4 were compared with steps of 1"


@settings(max_examples=50)
@given(st.lists(st.tuples(*[st.floats(0.97, 1.03)] * 4), min_size=60, max_size=60))
def test_the_noise_of_the_others_does_not_make_a_rate_larger(noise: list[tuple[float, ...]]) -> None:
    tracker, rates = HealthTracker(), (1.0, 1.0, 1.0, 2.0)
    for number, step in enumerate(noise):
        slow = rates if number >= 20 else (1.0,) * 4
        tracker.observe({r: x * slow[r] for r, x in enumerate(step)}, dict.fromkeys(range(4), 1.0))
    assert tracker.rates[3] == pytest.approx(2.0, rel=0.13)
    assert [tracker.rates[rank] for rank in range(3)] == [1.0] * 3


def test_ranks_without_work_are_not_judged() -> None:
    tracker = HealthTracker(window=1, patience=1)
    for _ in range(4):
        tracker.observe({0: 1.0, 1: 5.0}, {0: 1.0, 1: 0.0})
        tracker.observe({1: 5.0}, {0: 1.0, 1: 0.0})
    assert tracker.rates == {0: 1.0}


def test_a_device_that_stands_by_is_judged_by_what_is_told_of_it() -> None:
    tracker = HealthTracker(window=3, lasting=3, patience=1)
    for step in range(12):
        tracker.observe({0: 1.0}, {0: 1.0}, {1: 4.0 if step < 6 else 1.0})
        assert tracker.changed() == {2: {0: 1.0, 1: 4.0}, 7: {0: 1.0, 1: 1.0}}.get(step)
    assert tracker.normals == {0: 1.0}, "nobody knows how it works"


def test_a_device_that_has_stood_by_has_its_normal_from_its_first_work() -> None:
    tracker = HealthTracker(window=3, lasting=3, patience=1)
    for _ in range(3):
        tracker.observe({0: 1.0}, {0: 1.0}, {1: 1.0})
    for _ in range(6):
        tracker.observe({0: 1.0, 1: 8.0}, {0: 1.0, 1: 1.0})
    assert tracker.normals == {0: 1.0, 1: 8.0}
    assert tracker.rates == {0: 1.0, 1: 1.0}


def test_unequal_work_is_no_slowness() -> None:
    tracker = HealthTracker(window=1, patience=1)
    for work in (1.0, 4.0, 0.5):
        tracker.observe({0: work * 2}, {0: work})
    assert tracker.rates == {0: 1.0}


def test_after_a_restart_old_steps_do_not_count() -> None:
    tracker = HealthTracker(window=3, patience=1)
    feed(tracker, [1.0] * 6 + [2.0])
    tracker.restart()
    assert feed(tracker, [2.0] * 2) == []
    assert feed(tracker, [2.0]) == [{0: 2.0}]


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(StateError, match="window 0, patience 2\nhint: give 1 or more"):
        HealthTracker(window=0)
    with pytest.raises(StateError, match="lasting is 4, settling 30, window 5, gap 0"):
        HealthTracker(lasting=4)
    with pytest.raises(StateError, match=r"hysteresis is 0\.5, threshold 0\.2"):
        HealthTracker(hysteresis=0.5)


def test_a_user_says_when_a_device_counts_as_slow() -> None:
    assert HealthTracker.of({}) == HealthTracker()
    calm = HealthTracker.of({"threshold": 1.0, "hysteresis": 0.5, "window": 20})
    assert (calm.threshold, calm.hysteresis, calm.window, calm.lasting, calm.settling) == (1.0, 0.5, 20, 20, 30)
    for wrong, message in (
        ({"treshold": 0.2}, "health has 'treshold'.*threshold"),
        ({"window": 2.5}, "health has window 2.5\nhint: give a whole number"),
        ({"threshold": 0.1, "hysteresis": 0.2}, "give 0 <= hysteresis <= threshold"),
    ):
        with pytest.raises(StateError, match=message):
            HealthTracker.of(wrong)
