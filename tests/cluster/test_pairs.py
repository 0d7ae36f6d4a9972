"""Links of pairs of nodes, or kinds, that are not as the others: what they say of two devices, and their file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.cluster.devices import PairLink
from hetu_fx.cluster.topology import Level
from hetu_fx.comm_ops.plans.cost import cheapest_ring_cost
from hetu_fx.errors import ClusterError
from hetu_fx.planner.price.alike import alike
from hetu_fx.plans.plan import Pipeline, Plan, Stage

SLOW = Link(1e7, 1e-3)
CLUSTER = Cluster.on_paper(
    [1e9] * 8,
    nodes="aabbccdd",
    kinds=["x"] * 6 + ["y"] * 2,
    intra=Link(1e10),
    inter=Link(1e9),
)


def slow(*names: str, of: str = "nodes") -> tuple[PairLink, ...]:
    return tuple(PairLink((one, other), SLOW.bytes_per_second, SLOW.latency_seconds, of) for one, other in names)


ONE_SLOW = replace(CLUSTER, pairs=slow("ac", "bc", "cd"))


def test_only_messages_of_the_pair_are_slow() -> None:
    assert ONE_SLOW.link(0, 4) == ONE_SLOW.link(5, 1) == ONE_SLOW.link(4, 7) == SLOW
    assert ONE_SLOW.link(0, 2) == ONE_SLOW.link(2, 7) == Link(1e9)
    assert ONE_SLOW.link(4, 5) == Link(1e10)
    assert {end.bytes_per_second for end in ONE_SLOW.ends(0, 4)} == {SLOW.bytes_per_second}


def test_kinds_are_asked_where_nodes_are_not_a_pair() -> None:
    kinds = replace(CLUSTER, pairs=(*slow("xy", of="kinds"), PairLink(("a", "d"), 5e8)))
    assert kinds.link(0, 7) == Link(5e8)
    assert kinds.link(2, 7) == SLOW
    assert kinds.link(0, 2) == Link(1e9)
    assert kinds.link(6, 7) == Link(1e10)


def test_rings_cost_what_their_slowest_pair_does_whichever_was_asked_first() -> None:
    for order in ((2, 4), (4, 2)):
        cluster = replace(ONE_SLOW)
        found = {other: cheapest_ring_cost(1e6, (0, other), cluster) for other in order}
        assert found[4] > 10 * found[2]
        assert cheapest_ring_cost(1e6, (2, 6), cluster) == pytest.approx(found[2])
    cluster = replace(ONE_SLOW)
    assert cluster.alike((0, 2)) == cluster.alike((1, 3)) == (0, 2)
    assert cluster.alike((0, 4)) == (0, 4)


def test_pipelines_are_alike_only_where_their_pairs_are() -> None:
    def found(cluster: Cluster, *groups: tuple[int, int]) -> tuple[int, ...]:
        return alike(Plan(tuple(Pipeline((Stage(ranks),)) for ranks in groups)), 9, cluster)

    groups = (0, 2), (1, 3), (6, 4)
    alike_kinds = replace(CLUSTER, devices=tuple(replace(device, kind="x") for device in CLUSTER.devices))
    one_slow = replace(alike_kinds, pairs=ONE_SLOW.pairs)
    assert found(alike_kinds, *groups) == (0, 0, 0)
    assert found(one_slow, *groups) == (0, 0, 2)
    assert one_slow.likeness(0) == one_slow.likeness(2) == one_slow.likeness(6) != one_slow.likeness(4)
    two_sites = replace(alike_kinds, pairs=slow("ac", "ad", "bc", "bd"))
    assert two_sites.likeness(0) == two_sites.likeness(2) != two_sites.likeness(4) == two_sites.likeness(5)


def test_a_file_says_pairs_beside_the_other_links(tmp_path: Path) -> None:
    ONE_SLOW.write(tmp_path / "cluster.json")
    assert Cluster.read(tmp_path / "cluster.json") == ONE_SLOW
    assert ONE_SLOW.to_json()["links"]["pairs"][0] == {
        "between": ["a", "c"],
        "of": "nodes",
        "bytes_per_second": 1e7,
        "latency_seconds": 1e-3,
    }
    assert "pairs" not in CLUSTER.to_json()["links"]
    assert "a - c 10 MB/s, 1 ms" in str(ONE_SLOW)


def test_pairs_of_nodes_that_have_gone_say_nothing_and_are_not_written() -> None:
    left = ONE_SLOW.without([4, 5])
    assert left.link(0, 2) == Link(1e9)
    assert "pairs" not in left.to_json()["links"]
    assert ONE_SLOW.with_inter(5e9).link(0, 4) == Link(5e9)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ({"between": ["a", "z"]}, r"links.pairs names nodes \['a', 'z'\].*\n.*'a', 'b', 'c', 'd'"),
        ({"between": ["x", "a"], "of": "kinds"}, r"names kinds \['a', 'x'\].*\n.*'x', 'y'"),
        ({"between": ["a", "a"]}, r"a pair of nodes is \['a', 'a'\]"),
        ({"between": ["a"]}, r"a pair of nodes is \['a'\]"),
        ({"between": ["a", "b"], "of": "racks"}, "one of 'racks'.*\n.*nodes, kinds"),
        ({"between": ["a", "b"], "bytes_per_second": 0}, "bytes_per_second"),
        ({"between": ["c", "a"]}, "stand twice"),
        ({"btween": ["c", "a"]}, "unknown key 'btween'.*between"),
    ],
)
def test_a_pair_that_cannot_be_is_refused(pair: dict[str, Any], message: str) -> None:
    document = ONE_SLOW.to_json()
    document["links"]["pairs"].append({"bytes_per_second": 1e8} | pair)
    with pytest.raises(ClusterError, match=message):
        Cluster.from_json(document)


def test_pairs_do_not_stand_beside_levels() -> None:
    document = ONE_SLOW.to_json()
    document["links"]["inter"]["per"] = "device"
    with pytest.raises(ClusterError, match="links of pairs, and levels"):
        Cluster.from_json(document)
    with pytest.raises(ClusterError, match="links of pairs, and levels"):
        replace(ONE_SLOW, levels=(Level("node", 1e10), Level("cluster", 1e9)))
