import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.errors import StateError
from hetu_fx.planner.simulate.events import Activity, Resource, Times, fair_rates, play

LINK, CORE = ("out", 0), ("compute", 0)


def test_activities_wait_for_others_and_for_their_latency() -> None:
    times = play([Activity(2.0, {CORE: 1.0}), Activity(3.0, {LINK: 1.0}, (0,), 0.5), Activity(1.0, {}, (0, 1))])
    assert times == (Times(0.0, 2.0), Times(2.0, 5.5), Times(5.5, 6.5))


def test_messages_share_a_link_and_speed_up_when_one_is_through() -> None:
    times = play([Activity(4.0, {LINK: 1.0}), Activity(1.0, {LINK: 1.0})])
    assert [time.end for time in times] == [pytest.approx(5.0), pytest.approx(2.0)]


def test_work_that_uses_other_resources_is_not_slowed() -> None:
    times = play([Activity(4.0, {LINK: 1.0}), Activity(4.0, {LINK: 1.0}), Activity(3.0, {CORE: 1.0})])
    assert times[2] == Times(0.0, 3.0)


def test_what_a_slowed_activity_leaves_of_a_resource_goes_to_the_others() -> None:
    uses: dict[int, dict[Resource, float]] = {0: {LINK: 1.0, CORE: 0.5}, 1: {LINK: 1.0}, 2: {CORE: 1.0}}
    assert fair_rates(uses) == {0: pytest.approx(0.5), 1: pytest.approx(0.5), 2: pytest.approx(0.75)}


def test_shares_that_fit_together_slow_nobody() -> None:
    assert fair_rates({0: {LINK: 0.3}, 1: {LINK: 0.7}}) == {0: 1.0, 1: 1.0}


def test_activities_that_take_no_time_end_at_once() -> None:
    times = play([Activity(0.0, {LINK: 1.0}), Activity(0.0, {}, (0,)), Activity(2.0, {LINK: 1.0}, (1,))])
    assert [time.end for time in times] == [0.0, 0.0, 2.0]


def test_activities_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(StateError, match=r"activities \[0, 1\] wait for each other"):
        play([Activity(1.0, {}, (1,)), Activity(1.0, {}, (0,))])


@pytest.mark.parametrize(
    "wrong", [{"seconds": -1.0}, {"seconds": float("nan")}, {"uses": {LINK: 0.0}}, {"uses": {LINK: float("inf")}}]
)
def test_impossible_activities_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(StateError, match="an activity"):
        Activity(**{"seconds": 1.0, **wrong})  # type: ignore[arg-type]


RESOURCES = [("out", number) for number in range(3)]
USES = st.dictionaries(st.sampled_from(RESOURCES), st.floats(0.1, 1.0), min_size=1)


@given(st.lists(USES, min_size=1, max_size=6))
def test_no_resource_is_used_beyond_its_whole_and_nobody_could_go_faster(found: list[dict[Resource, float]]) -> None:
    uses = dict(enumerate(found))
    rates = fair_rates(uses)
    used = {r: sum(rates[a] * shares.get(r, 0.0) for a, shares in uses.items()) for r in RESOURCES}
    assert max(used.values()) <= 1 + 1e-6
    for activity, shares in uses.items():
        assert rates[activity] == 1.0 or any(used[r] >= 1 - 1e-6 for r in shares)


@given(st.lists(st.tuples(USES, st.floats(0.1, 5.0)), min_size=1, max_size=6))
def test_all_work_is_done_between_its_fastest_and_one_after_the_other(
    found: list[tuple[dict[Resource, float], float]],
) -> None:
    times = play([Activity(seconds, uses) for uses, seconds in found])
    end, total = max(time.end for time in times), sum(seconds for _, seconds in found)
    assert max(seconds for _, seconds in found) - 1e-6 <= end <= total + 1e-6
