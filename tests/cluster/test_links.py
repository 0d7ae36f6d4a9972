from pathlib import Path
from typing import Any

import pytest

from hetu_fx.cluster.links import COLLECTIVES, SIZES, inter_pairs, line_through, neighbours, settled_limits
from tests.spawned import results_of


def test_neighbours_in_speed_inside_nodes_are_timed_and_no_rank_twice_in_a_round() -> None:
    nodes, speeds = "abacbaa", [4.0, 1.0, 2.0, 1.0, 3.0, 1.0, 3.0]
    assert neighbours(nodes, speeds) == ([(0, 6), (2, 5), (4, 1)], [(6, 2)])


def test_between_nodes_the_fastest_ranks_of_neighbours_are_timed() -> None:
    assert inter_pairs("abacba", [4.0, 1.0, 2.0, 1.0, 3.0, 1.0]) == [(0, 4), (4, 3)]


def test_of_equal_devices_the_first_are_timed_and_a_lone_one_is_not() -> None:
    assert neighbours("aaa", [1.0] * 3) == ([(0, 1)], [(1, 2)])
    assert (neighbours("a", [1.0]), inter_pairs("aa", [1.0, 1.0])) == (([], []), [])


def test_a_rank_reaches_what_it_does_with_the_next_faster_one_and_equal_ones_their_median() -> None:
    timed = {(0, 1): (900.0, 0.0), (1, 2): (300.0, 0.0), (2, 3): (100.0, 0.0), (3, 4): (120.0, 0.0)}
    assert settled_limits(timed, "aaaaa", [4.0, 3.0, 2.0, 1.0, 1.0]) == {0: 900, 1: 900, 2: 300, 3: 110, 4: 110}


def test_the_small_size_tells_the_latency_and_both_the_bandwidth() -> None:
    found = line_through("all_gather", "inter", 4, small=1e-3, large=1e-3 + (SIZES[1] - SIZES[0]) / 2e8)
    assert (found.name, found.where, found.num_ranks) == ("all_gather", "inter", 4)
    assert (found.latency_seconds, found.bytes_per_second) == (1e-3, pytest.approx(2e8))


def test_noise_that_makes_more_bytes_faster_still_gives_a_line() -> None:
    assert line_through("all_reduce", "intra", 2, small=2e-3, large=1e-3).bytes_per_second > 0


def time_as(rank: int, store: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from hetu_fx.cluster.links import time_collectives
    from hetu_fx.comm_ops.wire.groups import GroupTable

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    results.put((rank, time_collectives(GroupTable(), {"intra": (0, 2), "inter": (0, 1, 2)})))
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_every_rank_is_told_the_same_of_every_collective_and_group(tmp_path: Path) -> None:
    found = results_of(time_as, 3, str(tmp_path / "store"), seconds=220)
    assert found[0] == found[1] == found[2]
    expected = [(name, where, ranks) for where, ranks in (("intra", 2), ("inter", 3)) for name in COLLECTIVES]
    assert [(c.name, c.where, c.num_ranks) for c in found[0]] == expected
    assert all(c.bytes_per_second > 0 and c.latency_seconds > 0 for c in found[0])
