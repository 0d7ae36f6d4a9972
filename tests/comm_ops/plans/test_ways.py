"""Of several ways between the same ends the quickest is taken."""

from __future__ import annotations

from hetu_fx.comm_ops.plans.ways import DIRECT, STAGED, Way, quickest, stood_twice

CUDA = ("cuda", "cuda")


def test_the_quickest_way_of_a_usual_message_is_taken_between_each_two_ends() -> None:
    slow, detour = Way(DIRECT, CUDA, "inter", 1e8), Way(STAGED, CUDA, "inter", 2e8, 1e-4)
    near, far = Way(DIRECT, CUDA, "intra", 1e10), Way(STAGED, CUDA, "intra", 1e9)
    assert quickest((slow, detour, far, near)) == {slow.ends: detour, near.ends: near}


def test_latency_counts_and_ways_that_are_equal_go_direct() -> None:
    late = Way(STAGED, CUDA, "inter", 2e8, 1.0)
    direct = Way(DIRECT, CUDA, "inter", 1e8)
    assert quickest((late, direct))[late.ends] == direct
    same = Way(STAGED, CUDA, "inter", 1e8)
    assert quickest((same, direct))[same.ends] == direct


def test_a_way_that_is_told_of_twice_is_found() -> None:
    way, other = Way(DIRECT, CUDA, "inter", 1e8), Way(DIRECT, CUDA, "inter", 3e8)
    assert stood_twice((way, other)) == [(DIRECT, way.ends)]
    assert stood_twice((way,)) == []
