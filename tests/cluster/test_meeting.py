import pytest

from hetu_fx.cluster.meeting import Sample, meeting_rounds, meeting_seconds, settled_seconds


def samples(*lost: float) -> list[Sample]:
    """Return samples of four rounds in which each meeting takes so many seconds."""
    return [Sample(alone=1.0, together=1.0 + 4 * seconds, rounds=4) for seconds in lost]


def test_a_meeting_costs_what_rounds_with_it_take_longer_less_its_message() -> None:
    assert meeting_seconds(samples(0.005), 0.001) == pytest.approx(0.004)


def test_one_disturbed_sample_does_not_count() -> None:
    assert meeting_seconds(samples(0.005, 0.9, 0.004), 0.0) == pytest.approx(0.005)


def test_a_meeting_never_gains_time() -> None:
    assert meeting_seconds(samples(-0.01, -0.02, 0.003), 0.0) == 0.0


def test_neighbours_in_speed_on_a_node_meet() -> None:
    assert meeting_rounds("aaaa", [2, 8, 1, 4]) == (((1, 3), (0, 2)),)
    assert meeting_rounds("abab", [1, 1, 2, 2]) == (((2, 0), (3, 1)),)


def test_every_rank_meets_another_whatever_the_nodes() -> None:
    for nodes in ("ab", "abc", "aab", "aaab", "aaabbbc", "aabbcde", "aaa"):
        rounds = meeting_rounds(nodes, [1.0] * len(nodes))
        assert {rank for pairs in rounds for pair in pairs for rank in pair} == set(range(len(nodes)))
        for pairs in rounds:
            busy = [rank for pair in pairs for rank in pair]
            assert len(busy) == len(set(busy)), f"{nodes}: {pairs}"


def test_a_device_that_is_alone_meets_nobody() -> None:
    assert meeting_rounds("a", [1.0]) == ()


def test_devices_that_are_alike_lose_the_same() -> None:
    assert settled_seconds("aaba", {0: 0.001, 1: 0.004, 2: 0.0070001, 3: 0.003}) == (0.003, 0.003, 0.007, 0.003)
    assert settled_seconds("ab", {}) == (0.0, 0.0)
