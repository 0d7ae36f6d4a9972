"""The time that a search has, by a clock that the test sets."""

from __future__ import annotations

from hetu_fx.planner.values.time_limit import TimeLimit


class Clock:
    """A clock."""

    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_a_search_goes_on_until_its_time_is_over_and_it_has_found_something() -> None:
    clock = Clock()
    limit = TimeLimit(10.0, clock)
    assert not limit.ends({1: 2})
    clock.now = 15.0
    assert not limit.ends({})
    assert not limit.cut
    assert limit.ends({1: 2})
    assert limit.cut


def test_without_seconds_it_is_never_over() -> None:
    clock = Clock()
    limit = TimeLimit(clock=clock)
    clock.now = 1e12
    assert not limit.ends(True)
