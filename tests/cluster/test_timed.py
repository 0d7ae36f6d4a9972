"""What a turn around a ring was seen to take."""

from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.devices import Collective

SIZE = 1e6


def cluster(*collectives: Collective) -> Cluster:
    return replace(Cluster.on_paper([1e9] * 3), collectives=collectives)


def timed(name: str, seconds: float) -> Collective:
    return Collective(name, "intra", 3, SIZE / seconds)


def test_without_a_timed_group_nobody_knows() -> None:
    assert cluster().turn_seconds(SIZE, (0, 1, 2)) is None
    assert cluster(timed("all_gather", 0.1)).turn_seconds(SIZE, (0, 1)) is None


def test_an_all_reduce_is_two_turns() -> None:
    assert cluster(timed("all_reduce", 0.2)).turn_seconds(SIZE, (0, 1, 2)) == pytest.approx(0.1)


def test_of_padded_and_grouped_the_faster_counts() -> None:
    found = cluster(timed("reduce_scatter", 0.4), timed("grouped_reduce_scatter", 0.1), timed("all_gather", 0.3))
    assert found.turn_seconds(SIZE, (0, 1, 2)) == pytest.approx(0.2)


def test_sums_take_what_sums_were_seen_to_and_others_what_others_were() -> None:
    found = cluster(timed("all_reduce", 1.0), timed("all_gather", 0.2), timed("reduce_scatter", 0.4))
    assert found.turn_seconds(SIZE, (0, 1, 2), of_sum=True) == pytest.approx(0.5)
    assert found.turn_seconds(SIZE, (0, 1, 2)) == pytest.approx(0.3)
