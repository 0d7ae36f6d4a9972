from __future__ import annotations

import pytest

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.search.estimates import Estimates
from hetu_fx.planner.search.stage_estimates import ReplicaRules
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=4, rows=16)
SLOW = Link(1e6, 0.0)


def estimates(nodes: str, link: Link = SLOW) -> Estimates:
    count = len(nodes)
    rules = ReplicaRules("1f1b", 0, (4, 8), dict.fromkeys(range(count), 1 << 50))
    return Estimates(COSTS, paper(*[1] * count, nodes=nodes, inter=link), rules)


@pytest.mark.parametrize(("nodes", "crowds"), [("aabb", (2,)), ("abab", (1,)), ("abcd", (1,)), ("aabc", (2,))])
def test_as_many_share_a_link_as_hand_over_through_it(nodes: str, crowds: tuple[int, ...]) -> None:
    assert estimates(nodes).hand_overs.crowds([((0,), (2,)), ((1,), (3,))]) == crowds


def test_each_edge_of_pipelines_has_its_own_crowd() -> None:
    pipelines = [((0,), (2,), (4,)), ((1,), (3,), (5,))]
    assert estimates("aabbbb").hand_overs.crowds(pipelines) == (2, 1)


def test_hand_overs_in_a_node_wait_for_nobody() -> None:
    found = estimates("aaaa")
    replica = found.replica(((0,), (2,)), (2, 2))
    assert found.hand_overs.among([((0,), (2,)), ((1,), (3,))], replica) == (replica, 0.0)


@pytest.mark.parametrize("link", [Link(1e9, 0.0), Link(1e3, 0.0)])
def test_hand_overs_share_a_link(link: Link) -> None:
    found, pipelines = estimates("aabb", link), [((0,), (2,)), ((1,), (3,))]
    replica = found.replica(pipelines[0], (2, 2))
    among, crossing = found.hand_overs.among(pipelines, replica)
    assert crossing == pytest.approx(2 * COSTS.boundary(2) / link.bytes_per_second)
    assert among.passing.edges[0].slope == pytest.approx(2 * replica.passing.edges[0].slope)  # there are no others
    assert among.passing.work == replica.passing.work


def test_hand_overs_wait_while_those_of_other_stages_keep_their_link_busy() -> None:
    found, pipelines = estimates("aabbcc", Link(1e9, 0.0)), [((0,), (2,), (4,)), ((1,), (3,), (5,))]
    replica = found.replica(pipelines[0], (1, 2, 1))
    among, crossing = found.hand_overs.among(pipelines, replica)
    own = 2 * COSTS.boundary(1) / 1e9
    assert crossing == pytest.approx(2 * own)  # the node in the middle sends forwards and backwards
    busy = own / replica.with_crowds((2, 2)).passing.beat(1)
    assert 0 < busy < 1
    assert [edge.slope for edge in among.passing.edges] == pytest.approx(
        [2 * (1 + busy / 2) * edge.slope for edge in replica.passing.edges]
    )
