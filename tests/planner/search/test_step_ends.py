from __future__ import annotations

import pytest

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.search.estimates import Estimates
from hetu_fx.planner.search.stage_estimates import ReplicaRules
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=4, rows=16)
LINK = Link(1e6, 0.0)
RULES = ReplicaRules("1f1b", 1, (4, 8), dict.fromkeys(range(8), 1 << 50))
ESTIMATES = Estimates(COSTS, paper(*[1] * 8, nodes="aabbccdd", inter=LINK), RULES)


def seconds(start: int, stop: int) -> float:
    """Return how long the parameters of some blocks keep a link busy if all of them go through it."""
    return COSTS.stage(start, stop).parameter_bytes / LINK.bytes_per_second


def test_each_node_that_holds_a_stage_sends_what_the_others_lack() -> None:
    replica = ESTIMATES.replica(((0,), (1,)), (1, 3))
    held = ESTIMATES.ends.held([((0,), (1,)), ((2,), (3,))], replica)
    assert held == ((1, frozenset({0, 1})), (4, frozenset({0, 1})))
    ((first, last),) = ESTIMATES.ends.links([held], 1)
    assert first == (1, pytest.approx(seconds(0, 1) / 2))
    assert last == (4, pytest.approx((seconds(0, 1) + seconds(1, 4)) / 2))
    ((whole, _),) = ESTIMATES.ends.links([held], 0)
    assert whole[1] == pytest.approx(2 * first[1])


def test_a_stage_in_one_node_sends_nothing_unless_others_hold_it_too() -> None:
    held = ESTIMATES.ends.held([((0,), (2,)), ((1,), (3,))], ESTIMATES.replica(((0,), (2,)), (2, 2)))
    assert ESTIMATES.ends.links([held], 1) == ()
    found = ESTIMATES.ends.links([held], 1, others=1)
    by_stop = {stop: busy for (stop, busy), *_ in found}
    assert by_stop == pytest.approx({2: seconds(0, 2) / 2, 4: seconds(2, 4) / 2})


def test_pipelines_of_other_stages_meet_block_by_block() -> None:
    ends = ESTIMATES.ends
    two = ends.held([((0,), (2,))], ESTIMATES.replica(((0,), (2,)), (1, 3)))
    other = ends.held([((4,), (6,))], ESTIMATES.replica(((4,), (6,)), (2, 2)))
    by_node = {busy[0][0]: [stop for stop, _ in busy] for busy in ends.links([two, other], 1)}
    assert by_node == {1: [1, 2], 2: [2, 4], 4: [4]}
    assert max(busy[-1][1] for busy in ends.links([two, other], 1)) == pytest.approx(
        max(seconds(0, 1) + seconds(1, 2), seconds(1, 2) + seconds(2, 4)) / 2
    )


def test_gradients_that_come_last_travel_after_all_pipelines() -> None:
    groups = (((0,), (2,)), ((4,), (6,)))
    replica = ESTIMATES.replica(groups[0], (2, 2))
    links = ESTIMATES.ends.links([ESTIMATES.ends.held(groups, replica)], 1)
    end = ESTIMATES.ends.of([replica], [one[0] for one in groups], [one[-1] for one in groups], 1, links)
    late = max(line(2) for line in end.late(replica))
    first, last = seconds(0, 2) / 2, seconds(2, 4) / 2
    assert late >= max(first - replica.left(2)(2), last - replica.left(4)(2)) * (1 - 1e-12)
    assert end.seconds(late) >= end.gather + late + end.update
    assert end.seconds(-1.0) == pytest.approx(end.gather + end.gradients / end.pieces + end.update)


def test_the_devices_of_each_stage_meet_those_of_the_same() -> None:
    groups = (((0,), (2,)), ((1,), (3,)))  # stages stand in nodes of their own
    replica = ESTIMATES.replica(groups[0], (2, 2))
    near = ESTIMATES.ends.of([replica], [(0,), (1,)], [(2,), (3,)], 1)
    far = ESTIMATES.ends.of([replica], [(0,), (2,)], [(1,), (3,)], 1)
    assert near.ring < 0.1 * far.ring
