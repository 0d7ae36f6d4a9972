"""What a step's end takes with homes as they are: equal shares as `cost` says, and what a slow owner costs all."""

from __future__ import annotations

import pytest

from hetu_fx.annotations.annotation import Annotation, Duplicate, Split
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.price.step_end import (
    OPTIMIZER_MOVES,
    TURN_MOVES,
    ParameterHome,
    home_end_seconds,
    move_seconds,
    optimizer_seconds,
    owned_bytes,
    update_seconds_per_byte,
)
from hetu_fx.planner.values.device_memory import MOMENTS

EVERYWHERE = Annotation.on((0, 1, 2), Duplicate(3))
SHAPE = (180, 10)
BYTES = 180 * 10 * 4


def cluster(**rates: float) -> Cluster:
    made = Cluster.on_paper((5e9, 5e9, 5e9), intra=Link(1e9))
    return made.with_rates({int(rank.removeprefix("r")): rate for rank, rate in rates.items()})


def end(shares: tuple[int, ...], on: Cluster, ranks: tuple[int, ...] = (0, 1, 2)) -> float:
    """Give the end of a step of one parameter that all read, and that `ranks` own in such shares."""
    home = Annotation.on(ranks, Split(0, shares)) if len(ranks) > 1 else Annotation.on(ranks)
    return home_end_seconds([ParameterHome(SHAPE, 4, home, EVERYWHERE)], on)


def test_equal_shares_take_what_equal_owners_do() -> None:
    device = cluster().device(0)
    turn = BYTES * 2 / 3 / 1e9 + BYTES * 2 / 3 * TURN_MOVES * device.flops_per_byte / device.speed
    assert end((1, 1, 1), cluster()) == pytest.approx(2 * turn + optimizer_seconds(BYTES / 3, device))


def test_a_slow_owner_makes_the_end_of_a_step_long_until_it_owns_less() -> None:
    slow = cluster(r2=4.0)
    assert end((1, 1, 1), slow) > end((4, 4, 1), slow) > end((4, 4, 1), cluster())
    assert end((1, 1, 1), cluster()) < end((4, 4, 1), cluster()), "for devices of one speed equal shares are best"


def test_an_update_takes_as_long_as_its_slowest_owner() -> None:
    elsewhere = home_end_seconds([ParameterHome(SHAPE, 4, Annotation.on((1,)), None)], cluster(r1=3.0))
    assert elsewhere == pytest.approx(3 * BYTES * OPTIMIZER_MOVES / 1e9)


def test_an_update_takes_what_it_was_seen_to_take() -> None:
    quarter = Annotation.on((0, 1), Split(0, (1, 3)))
    assert owned_bytes([ParameterHome(SHAPE, 4, quarter, None)]) == {0: BYTES / 4, 1: BYTES * 3 / 4}
    seconds = home_end_seconds([ParameterHome(SHAPE, 4, quarter, None)], cluster(), {0: 3e-6, 1: 2e-6})
    assert seconds == pytest.approx(BYTES * 1.5e-6)


def test_a_device_that_owns_nothing_takes_for_a_byte_what_others_do_at_its_speed() -> None:
    found = update_seconds_per_byte({0: 2.0, 1: 6.0, 2: 9.0}, {0: 10.0, 1: 10.0}, cluster(r1=3.0, r2=2.0))
    assert found == pytest.approx({0: 0.2, 1: 0.6, 2: 0.4})
    assert update_seconds_per_byte({0: 0.0}, {0: 10.0}, cluster()) == {}


def test_what_nobody_else_reads_travels_nowhere() -> None:
    at_home = home_end_seconds([ParameterHome(SHAPE, 4, Annotation.on((1,)), Annotation.on((1,)))], cluster())
    abroad = home_end_seconds([ParameterHome(SHAPE, 4, Annotation.on((1,)), Annotation.on((2,)))], cluster())
    assert at_home == pytest.approx(BYTES * OPTIMIZER_MOVES / 1e9)
    assert abroad > at_home + 2 * BYTES / 1e9


def test_copies_at_home_are_summed_and_not_gathered() -> None:
    copies = home_end_seconds([ParameterHome(SHAPE, 4, EVERYWHERE, EVERYWHERE)], cluster())
    sync = 2 * BYTES / 1e9 + 4 * BYTES * TURN_MOVES / 2 / 1e9  # two gradients come to the first, their sum goes to two
    assert copies == pytest.approx(sync + BYTES * OPTIMIZER_MOVES / 1e9)


def test_a_move_takes_what_its_busiest_device_sends_or_receives() -> None:
    before, after = Annotation.on((0, 1), Split(0, (1, 1))), Annotation.on((1, 2), Split(0, (1, 1)))
    num_bytes = (1 + MOMENTS) * BYTES / 2  # half goes from 0 to 1, half from 1 to 2
    fast, slow = (move_seconds([ParameterHome(SHAPE, 4, before, after)], at) for at in (cluster(), cluster(r1=2.0)))
    assert fast == pytest.approx(num_bytes / 1e9 + 2 * num_bytes * TURN_MOVES / 2 / 1e9)
    assert slow == pytest.approx(num_bytes / 1e9 + 2 * 2 * num_bytes * TURN_MOVES / 2 / 1e9)
    assert move_seconds([ParameterHome(SHAPE, 4, before, before)], cluster()) == 0.0
