"""What changes of variant cost, from when steps began."""

from __future__ import annotations

from hetu_fx.switching.step.step_report import StepTimes, SwitchCost


def times_of(*steps: tuple[str, int, bool, float]) -> StepTimes:
    """Take in steps of (variant, changes so far, whether it builds, seconds)."""
    times, now = StepTimes(), 10.0
    for variant, switches, builds, seconds in steps:
        times.begin(now)
        times.train(variant, switches, builds=builds)
        now += seconds
    times.begin(now)
    return times


def test_steps_after_a_change_are_told_beside_those_without_one_and_those_that_make_graphs() -> None:
    times = times_of(
        ("a", 0, True, 9.0), ("a", 0, False, 2.0), ("b", 1, True, 8.0), ("a", 2, False, 3.0), ("a", 2, False, 2.0)
    )
    assert times.cost("a") == SwitchCost(1, 2.0, 3.0, 9.0)
    assert times.cost("a").share == 0.5
    assert times.cost("b") == SwitchCost(0, None, None, 8.0)
    assert times.cost("b").share is None


def test_an_evaluation_ends_the_step_before_it_and_is_no_step() -> None:
    times = StepTimes()
    times.begin(0.0)
    times.train("a", 0, builds=False)
    times.begin(2.0)
    times.begin(7.0)
    assert times.cost("a") == SwitchCost(0, 2.0, None, None)


def test_a_change_for_an_evaluation_alone_is_a_change_for_the_step_after_it() -> None:
    assert times_of(("a", 0, False, 2.0), ("a", 2, False, 3.0)).cost("a") == SwitchCost(1, 2.0, 3.0, None)


def test_only_the_newest_steps_count() -> None:
    steps = [("a", 0, False, 5.0)] * 100 + [("a", 0, False, 1.0)] * 64
    assert times_of(*steps).cost("a").stayed_seconds == 1.0
