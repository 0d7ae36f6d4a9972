from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.devices import PairLink
from hetu_fx.cluster.links import (
    COLLECTIVES,
    TimedGroup,
    groups_to_time,
    neighbours,
    node_rounds,
    node_units,
    pairs_of_types,
    settled_limits,
    settled_pairs,
    timed_collective,
    tournament,
)
from hetu_fx.cluster.timed import SIZES
from hetu_fx.comm_ops.plans.cost import cheapest_ring_cost
from tests.spawned import results_of


def test_neighbours_in_speed_inside_nodes_are_timed_and_no_rank_twice_in_a_round() -> None:
    nodes, speeds = "abacbaa", [4.0, 1.0, 2.0, 1.0, 3.0, 1.0, 3.0]
    assert neighbours(nodes, speeds) == ([(0, 6), (2, 5), (4, 1)], [(6, 2)])


def test_between_nodes_the_fastest_ranks_of_each_two_are_timed_in_disjoint_pairs() -> None:
    rounds = node_rounds("abacba", "xxxxxx", [4.0, 1.0, 2.0, 1.0, 3.0, 1.0])
    assert sorted(sorted(pair) for pairs in rounds for pair in pairs) == [[0, 3], [0, 4], [3, 4]]


@pytest.mark.parametrize("count", range(9))
def test_in_a_tournament_each_two_meet_once_and_nobody_twice_in_a_round(count: int) -> None:
    rounds = tournament(count)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({player for pair in pairs for player in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == max(0, count - 1 + count % 2)


def test_of_many_nodes_each_two_kinds_are_timed() -> None:
    nodes = [str(number) for number in range(20)]
    rounds = node_rounds(nodes, ["x"] * 5 + ["y"] * 15, [1.0] * 20)
    assert rounds[0] == [(0, 1), (2, 3)]
    assert [len(pairs) for pairs in rounds] == [2, 7, 5]
    timed = {pair: (9.0 if pair == (0, 1) else 90.0, 0.0) for pairs in rounds for pair in pairs}
    usual, unlike = settled_pairs(timed, nodes, ["x"] * 5 + ["y"] * 15)
    assert usual == (90.0, 0.0)
    assert unlike == (PairLink(("x", "x"), 49.5, of="kinds"),)


def test_a_slow_machine_makes_no_other_link_slow() -> None:
    """Figures that differ little are one; what most pairs have is the link between nodes."""
    names = "abcd"
    timed = {(0, 1): (100.0, 1e-5), (0, 2): (90.0, 2e-5), (1, 2): (98.0, 3e-5)}
    timed |= {(0, 3): (10.0, 2e-5), (1, 3): (11.0, 1e-3)}
    usual, unlike = settled_pairs(timed, names, "xxxx")
    assert usual == (98.0, 2e-5)
    assert unlike == (PairLink(("a", "d"), 10.5, 2e-5), PairLink(("b", "d"), 10.5, 1e-3))
    assert settled_pairs({(0, 1): (7.0, 0.0)}, names, "xxxx") == ((7.0, 0.0), ())
    assert settled_pairs({}, "a", "x") == (None, ())


def test_of_equal_devices_the_first_are_timed_and_a_lone_one_is_not() -> None:
    assert neighbours("aaa", [1.0] * 3) == ([(0, 1)], [(1, 2)])
    assert (neighbours("a", [1.0]), node_rounds("aa", "xx", [1.0, 1.0])) == (([], []), [])


def test_a_rank_reaches_what_it_does_with_the_next_faster_one_and_equal_ones_their_median() -> None:
    timed = {(0, 1): (900.0, 0.0), (1, 2): (300.0, 0.0), (2, 3): (100.0, 0.0), (3, 4): (120.0, 0.0)}
    assert settled_limits(timed, "aaaaa", [4.0, 3.0, 2.0, 1.0, 1.0]) == {0: 900, 1: 900, 2: 300, 3: 110, 4: 110}


PAIR = TimedGroup("inter", (0, 1, 2, 3), "cpu", 2)


def test_every_size_is_kept_and_the_ends_tell_the_line() -> None:
    seconds = [1e-3, 1.5e-3, 1e-3 + (SIZES[-1] - SIZES[0]) / 2e8]
    found = timed_collective("all_gather", PAIR, seconds)
    assert (found.name, found.where, found.num_ranks, found.kind, found.num_nodes) == (
        "all_gather",
        "inter",
        4,
        "cpu",
        2,
    )
    assert (found.latency_seconds, found.bytes_per_second) == (1e-3, pytest.approx(2e8, rel=1e-2))
    assert [found.seconds(size) for size in SIZES] == pytest.approx(seconds, rel=1e-2)
    assert found.seconds((SIZES[0] + SIZES[1]) / 2) == pytest.approx(1.25e-3)
    assert found.seconds(1 << 30) == pytest.approx(1e-3 + (1 << 30) / 2e8, rel=1e-2)


def test_what_is_larger_takes_no_less_whatever_a_smaller_one_has_waited() -> None:
    found = timed_collective("all_reduce", PAIR, [3e-3, 1e-3, 2e-3])
    assert [found.seconds(size) for size in (0, *SIZES)] == pytest.approx([1e-3, 1e-3, 1e-3, 2e-3], rel=1e-2)
    assert timed_collective("all_reduce", PAIR, [2e-3, 1e-3, 1e-3]).bytes_per_second > 0


def test_groups_of_every_size_of_a_kind_are_timed_and_one_across_its_nodes() -> None:
    cluster = Cluster.on_paper([1e9] * 6 + [2e9], nodes="aaaabbb", kinds=["x"] * 6 + ["y"])
    assert groups_to_time(cluster.groups, cluster.devices) == (
        TimedGroup("intra", (0, 1, 2, 3)),
        TimedGroup("inter", tuple(range(7))),
        TimedGroup("intra", (0, 1), "x", 1),
        TimedGroup("intra", (0, 1, 2, 3), "x", 1),
        TimedGroup("inter", (0, 4), "x", 2),
    )


def test_every_search_prices_rings_as_they_were_timed_among_such_devices() -> None:
    cluster = Cluster.on_paper([1e9] * 4, kinds=["x"] * 4)
    sums = timed_collective("all_reduce", TimedGroup("intra", (0, 1), "x", 1), [2e-3, 4e-3, 8e-3])
    found = replace(cluster, collectives=(sums,))
    assert cheapest_ring_cost(SIZES[1], (2, 3), found) == pytest.approx(2e-3)
    assert cheapest_ring_cost(SIZES[1], (0, 1, 2), found) == cheapest_ring_cost(SIZES[1], (0, 1, 2), cluster)
    slower = found.with_speeds({3: 5e8})
    assert cheapest_ring_cost(SIZES[1], (2, 3), slower) == cheapest_ring_cost(SIZES[1], (2, 3), cluster)
    assert Cluster.from_json(found.to_json()) == found


def time_as(rank: int, store: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from hetu_fx.cluster.links import time_collectives
    from hetu_fx.comm_ops.wire.groups import GroupTable

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    results.put((rank, time_collectives(GroupTable(), (TimedGroup("intra", (0, 2)), TimedGroup("inter", (0, 1, 2))))))
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_every_rank_is_told_the_same_of_every_collective_and_group(tmp_path: Path) -> None:
    found = results_of(time_as, 3, str(tmp_path / "store"), seconds=220)
    assert found[0] == found[1] == found[2]
    expected = [(name, where, ranks) for where, ranks in (("intra", 2), ("inter", 3)) for name in COLLECTIVES]
    assert [(c.name, c.where, c.num_ranks) for c in found[0]] == expected
    assert all(c.bytes_per_second > 0 and c.latency_seconds > 0 for c in found[0])


def test_devices_of_several_types_on_a_node_are_units_of_their_own() -> None:
    assert node_units("aab", ["cpu", "cpu", "cuda"]) == ["a", "a", "b"]
    assert node_units("aab", ["cpu", "cuda", "cuda"]) == ["a cpu", "a cuda", "b cuda"]


def test_the_fastest_of_neighbouring_types_tell_the_link_between_types() -> None:
    types = ["cpu", "cpu", "cuda", "cuda", "cpu"]
    assert pairs_of_types("aaaab", types, [1.0, 2.0, 8.0, 9.0, 1.0]) == [(3, 1)]
    assert pairs_of_types("aabb", ["cpu"] * 4, [1.0] * 4) == []
