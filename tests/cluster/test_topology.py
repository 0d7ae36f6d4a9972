"""More than two levels, ports and rails: what links two devices, and what messages share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import cheapest_tiers, messages_cost, ring_cost, two_level_ring_cost
from hetu_fx.errors import ClusterError

GB = 1e9
LEVELS = [
    {"within": "switch", "bytes_per_second": 400 * GB},
    {"within": "node", "bytes_per_second": 100 * GB},
    {"within": "rack", "bytes_per_second": 40 * GB, "per": "node"},
    {"within": "cluster", "bytes_per_second": 10 * GB, "latency_seconds": 1e-5, "per": "rack"},
]
NO_PLACE: dict[str, str] = {}


def device(rank: int, node: int, place: dict[str, str], **others: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "node": f"n{node}",
        "flops_per_second": 1e12,
        "memory_bytes": 1 << 30,
        "place": place,
        **others,
    }


def racks(num_racks: int = 2, nodes: int = 2, size: int = 4, **others: Any) -> Cluster:
    """Return racks of nodes of two switches."""
    devices = []
    for rank in range(num_racks * nodes * size):
        node, local = divmod(rank, size)
        devices.append(device(rank, node, {"switch": f"s{local * 2 // size}", "rack": f"r{node // nodes}"}))
    return Cluster.from_json({"format": "hetu_fx.cluster/1", "devices": devices, "levels": LEVELS, **others})


def rails(ports: int = 4, level: bool = True) -> Cluster:
    """Return two nodes of four devices, each on a port of its own, and a spine slower than ports."""
    above = [{"within": "rail", "bytes_per_second": 25 * GB}] if level else []
    levels = [{"within": "node", "bytes_per_second": 100 * GB}, *above]
    levels.append({"within": "cluster", "bytes_per_second": 5 * GB})
    devices = [device(rank, rank // 4, NO_PLACE) for rank in range(8)]
    nics = {"per_node": ports, "bytes_per_second": 20 * GB}
    return Cluster.from_json({"format": "hetu_fx.cluster/1", "devices": devices, "levels": levels, "nics": nics})


def test_two_devices_use_the_link_of_the_first_unit_that_both_stand_in() -> None:
    cluster = racks()
    assert [cluster.bytes_per_second(0, other) / GB for other in (1, 2, 4, 8)] == [400, 100, 40, 10]
    assert cluster.latency_seconds(0, 8) == 1e-5
    assert (cluster.intra.bytes_per_second, cluster.inter.bytes_per_second) == (100 * GB, 40 * GB)


def test_a_cluster_of_levels_is_read_again_from_its_file() -> None:
    for cluster in (racks(), rails()):
        assert Cluster.from_json(cluster.to_json()) == cluster
    assert "switch 400 GB/s" in str(racks())


def test_files_without_levels_say_whose_link_lies_between_nodes() -> None:
    devices = [device(rank, rank // 2, NO_PLACE) for rank in range(4)]
    inter = {"bytes_per_second": 10 * GB}
    crossing = [(0, 2, 10 * GB), (1, 3, 10 * GB)]
    seconds = {}
    for per in ("", "node", "device"):
        links = {"intra": {"bytes_per_second": 100 * GB}, "inter": inter | ({"per": per} if per else {})}
        cluster = Cluster.from_json({"format": "hetu_fx.cluster/1", "devices": devices, "links": links})
        assert Cluster.from_json(cluster.to_json()) == cluster
        seconds[per] = messages_cost(crossing, cluster), ring_cost(20 * GB, (0, 2), cluster)
    assert seconds == {"": (2.0, 1.0), "node": (2.0, 2.0), "device": (1.0, 1.0)}


def test_what_leaves_a_node_or_a_rack_shares_its_link() -> None:
    cluster = racks()
    assert messages_cost([(0, 4, 40 * GB)], cluster) == 1.0
    assert messages_cost([(0, 4, 40 * GB), (1, 5, 40 * GB)], cluster) == 2.0
    assert messages_cost([(0, 8, 10 * GB), (4, 12, 10 * GB)], cluster) == pytest.approx(2 * (1 + 1e-5))


def test_a_node_sends_no_more_than_its_ports() -> None:
    cluster = rails(ports=2)
    assert [found.nic for found in cluster.devices] == [0, 0, 1, 1] * 2
    assert cluster.bytes_per_second(0, 4) == 20 * GB
    assert messages_cost([(0, 4, 20 * GB), (2, 6, 20 * GB)], cluster) == 1.0
    assert messages_cost([(0, 4, 20 * GB), (1, 5, 20 * GB)], cluster) == 2.0


def test_devices_on_ports_of_one_number_do_not_need_the_spine() -> None:
    cluster = rails()
    assert (cluster.bytes_per_second(1, 5), cluster.bytes_per_second(1, 6)) == (20 * GB, 5 * GB)
    assert rails(level=False).bytes_per_second(1, 5) == 5 * GB


def test_ports_stay_where_devices_are_left_out() -> None:
    left = rails(ports=2).without([0, 1])
    assert [found.nic for found in left.devices] == [1, 1, 0, 0, 1, 1]


def test_rings_of_a_nodes_devices_share_its_ports_and_one_ring_of_all_uses_one() -> None:
    cluster = rails(ports=2)
    assert ring_cost(40 * GB, (0, 4), cluster) == pytest.approx(40 / 2 / (20 / 2))
    assert ring_cost(40 * GB, range(8), cluster) == pytest.approx(7 * 40 / 8 / 5)


def test_collectives_go_in_as_many_levels_as_is_cheapest() -> None:
    cluster = racks(size=4)
    ranks = tuple(range(16))
    tiers = cheapest_tiers(ranks, cluster)
    assert tiers == (tuple(r // 2 for r in ranks), tuple(r // 4 for r in ranks), tuple(r // 8 for r in ranks))
    one = [ring_cost(1e9, ranks, cluster), two_level_ring_cost(1e9, ranks, cluster)]
    assert one[1] < one[0]


def test_another_link_between_nodes_is_put_in_the_levels() -> None:
    assert racks().with_inter(7 * GB).bytes_per_second(0, 4) == 7 * GB
    assert racks().with_inter(7 * GB).bytes_per_second(0, 8) == 10 * GB


def test_neighbours_in_order_are_those_that_meet_first() -> None:
    cluster = racks()
    mixed = replace(cluster, devices=tuple(replace(d, rank=d.rank * 5 % 16) for d in cluster.devices))
    order = sorted(mixed.ranks, key=mixed.order)
    assert mixed.ranks[:4] != tuple(order[:4])
    rack = [400, 100, 400, 40, 400, 100, 400]
    assert [mixed.bytes_per_second(a, b) / GB for a, b in pairwise(order)] == [*rack, 10, *rack]


def test_a_thousand_devices_are_priced_from_their_places() -> None:
    cluster = racks(num_racks=8, nodes=16, size=8)
    assert len(cluster.ranks) == 1024
    assert len(cheapest_tiers(cluster.ranks, cluster)) >= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"levels": LEVELS[:3]}, "hint: from inside out, name one 'node', the last 'cluster'"),
        (
            {"levels": [*LEVELS[:2], {"within": "rail", "bytes_per_second": 1}, LEVELS[3]]},
            "hint: put 'rail' right above",
        ),
        ({"levels": [LEVELS[0], *LEVELS]}, "give each a name of its own"),
        (
            {"levels": [*LEVELS[:3], LEVELS[3] | {"per": "rak"}]},
            "is per 'rak' .did you mean 'rack'.*\nhint: give device",
        ),
        ({"links": {"intra": {"bytes_per_second": 1}}}, "'links', inside nodes and between them, or 'levels'"),
        ({"levels": []}, "'links', inside nodes and between them, or 'levels'"),
        ({"nics": {"per_node": 0, "bytes_per_second": 1}}, "per_node 0"),
        ({"devices": [device(0, 0, {"switch": "a"})]}, r"device 0: its place lacks 'rack'"),
        ({"devices": [device(0, 0, {"swich": "a", "rack": "r"})]}, r"names 'swich' .did you mean 'switch'"),
        (
            {"devices": [device(r, 0, {"switch": "a", "rack": f"r{r}"}) for r in (0, 1)]},
            "node 'n0' is in .*\nhint: give it one place",
        ),
        ({"devices": [device(0, 0, {"switch": "a", "rack": 3})]}, r"'rack' must be a string"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_json(racks().to_json() | changes)


def test_a_port_that_is_not_there_is_refused() -> None:
    document = rails().to_json()
    document["devices"][3]["nic"] = 4
    with pytest.raises(ClusterError, match="device 3 has nic 4, but a node has 4, counted from 0"):
        Cluster.from_json(document)


def test_a_message_uses_links_of_its_devices_inside_a_node_and_of_racks_and_ports_between() -> None:
    cluster = racks()
    assert cluster.all_ends(0, 1) == ((("out", 0), 400 * GB), (("in", 1), 400 * GB))
    across = {name for (name, _), _ in cluster.all_ends(0, 8)}
    assert across == {"out of node", "into node", "out of rack", "into rack"}
    assert cluster.shared_units(9) == (("node", 2), ("switch", 4), ("rack", 1))
    assert {name for (name, _), _ in rails(ports=2).all_ends(0, 4)} == {"out of port", "into port"}
    assert set(cluster.link_units.items()) >= {("out of rack", "rack"), ("into node", "node")}


def test_each_device_has_a_link_out_of_its_node_where_a_file_says_so() -> None:
    links = {"intra": {"bytes_per_second": 10 * GB}, "inter": {"bytes_per_second": GB, "per": "device"}}
    devices = [{name: value for name, value in device(r, r // 2, {}).items() if name != "place"} for r in range(4)]
    cluster = Cluster.from_json({"format": "hetu_fx.cluster/1", "devices": devices, "links": links})
    assert cluster.all_ends(0, 2) == ((("network out", 0), GB), (("network in", 2), GB))
    assert cluster.all_ends(0, 1) == ((("out", 0), 10 * GB), (("in", 1), 10 * GB))


def weaker() -> Cluster:
    """Return racks of nodes, one of which has fewer devices, and a device that sends less."""
    whole = racks(num_racks=3)
    slow = replace(whole.device(5), bytes_per_second=3 * GB)
    return replace(whole.without([23]), devices=(*(d for d in whole.without([23]).devices if d.rank != 5), slow))


@pytest.mark.parametrize("make", [racks, rails, weaker, lambda: rails(ports=2), lambda: rails(ports=1, level=False)])
def test_rings_that_links_know_no_difference_of_take_the_same(make: Callable[[], Cluster]) -> None:
    asked, drawn, seen = make(), random.Random(0), set()
    for _ in range(60):
        ring = tuple(sorted(drawn.sample(asked.ranks, drawn.randint(2, 6))))
        seen.add(asked.alike(ring))
        for cost in (ring_cost, two_level_ring_cost):
            assert cost(1e6, ring, asked) == cost(1e6, ring, make())
        assert cheapest_tiers(ring, asked) == cheapest_tiers(ring, make())
    assert len(seen) < 60


def test_rings_of_other_units_or_slower_devices_are_not_alike() -> None:
    cluster = weaker()
    assert cluster.alike((0, 1)) == cluster.alike((8, 9)) == (0, 1)
    assert cluster.alike((4, 5)) == (4, 5)
    assert cluster.alike((20, 21)) != (0, 1)  # there is a device less
    with pytest.raises(ClusterError, match="no device of rank 99"):
        cluster.alike((0, 99))
