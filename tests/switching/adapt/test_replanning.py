import pytest

from hetu_fx.switching.adapt.replanning import Conditions, nearest_known


@pytest.mark.parametrize(
    ("rates", "drained", "name"),
    [
        ({0: 1.0, 1: 1.0}, (), "healthy"),
        ({0: 1.0, 1: 2.5}, (), "slow-1x2.5"),
        ({2: 3.0, 1: 1.25}, (), "slow-1x1.25-2x3"),
        ({0: 1.0}, (3, 1), "without-1-3"),
        ({0: 2.0, 3: 4.0}, (3,), "without-3-slow-0x2"),
    ],
)
def test_conditions_are_named_for_slow_devices_and_those_left_out(
    rates: dict[int, float], drained: tuple[int, ...], name: str
) -> None:
    assert Conditions.of(rates, drained).name == name


def test_conditions_differ_by_the_device_whose_rate_differs_most() -> None:
    conditions = Conditions.of({0: 2.0, 1: 3.0})
    assert conditions.distance(Conditions.of({0: 2.0, 1: 3.3})) == pytest.approx(0.1)
    assert conditions.distance(Conditions.of({0: 1.6, 1: 3.0})) == pytest.approx(0.25)
    assert Conditions().distance(Conditions.of({4: 1.0})) == 0


@pytest.mark.parametrize("other", [Conditions(), Conditions.of({1: 2.0}), Conditions.of({0: 2.0}, (1,))])
def test_conditions_of_other_slow_or_drained_devices_have_nothing_in_common(other: Conditions) -> None:
    assert Conditions.of({0: 2.0}).distance(other) == float("inf")


def test_a_situation_has_the_plan_of_the_nearest_one_if_only_noise_tells_them_apart() -> None:
    known = [Conditions.of({0: rate}) for rate in (2.0, 2.08)]
    assert nearest_known(known, Conditions.of({0: 2.05})) == Conditions.of({0: 2.08})
    assert nearest_known(known, Conditions.of({0: 2.01})) == Conditions.of({0: 2.0})
    assert nearest_known(known, Conditions.of({0: 2.3})) is None
    assert nearest_known([], Conditions()) is None
