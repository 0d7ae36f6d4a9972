"""Ways between types of devices stand in the cluster file and are timed; the quickest is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from hetu_fx.cluster import links
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.measure import link_ways, measure_ways, pairs_to_time
from hetu_fx.cluster.ways import link_table
from hetu_fx.comm_ops.plans.ways import DIRECT, STAGED, Way
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import ClusterError
from tests.kinds import testkind
from tests.kinds.testkind import NAME, PLACE, on_testkind

CUDA = ("cuda", "cuda")
WAYS = (
    Way(DIRECT, CUDA, "inter", 1e8, 1e-5),
    Way(STAGED, CUDA, "inter", 3e8, 2e-5),
    Way(STAGED, ("cpu", "cuda"), "intra", 1e9),
)


def cluster_with(*ways: Way) -> Cluster:
    return replace(Cluster.on_paper([1e12]), ways=ways)


def test_a_cluster_file_keeps_its_ways() -> None:
    written = cluster_with(*WAYS).to_json()
    assert written["ways"][0] == {
        "way": "direct",
        "types": ["cuda", "cuda"],
        "where": "inter",
        "bytes_per_second": 1e8,
        "latency_seconds": 1e-5,
    }
    assert Cluster.from_json(written).ways == WAYS
    assert "ways" not in cluster_with().to_json()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"way": "flown"}, "goes 'flown' 'inter'\nhint: give one of"),
        ({"where": "away"}, "give one of"),
        ({"types": ["cuda"]}, "give the type at each end"),
        ({"bytes_per_second": 0}, "bytes_per_second"),
        ({"speed": 1}, "speed"),
    ],
)
def test_a_way_that_cannot_be_is_refused(change: dict[str, Any], told: str) -> None:
    written = cluster_with(*WAYS).to_json()
    written["ways"][0] |= change
    with pytest.raises(ClusterError, match=told):
        Cluster.from_json(written)


def test_a_way_that_stands_twice_is_refused() -> None:
    with pytest.raises(ClusterError, match="stand twice"):
        cluster_with(WAYS[0], WAYS[0])


def test_the_table_says_which_way_is_taken() -> None:
    assert link_table(WAYS) == [
        ["cpu - cuda", "intra", "staged", "1 GB/s", "0", "taken"],
        ["cuda - cuda", "inter", "direct", "100 MB/s", "10 us", ""],
        ["cuda - cuda", "inter", "staged", "300 MB/s", "20 us", "taken"],
    ]


def test_the_first_two_of_each_two_types_are_timed_inside_nodes_and_between() -> None:
    assert pairs_to_time("aabb", ["cuda", "cpu", "cuda", "cuda"]) == {
        (("cpu", "cuda"), "intra"): (0, 1),
        (CUDA, "inter"): (0, 2),
        (("cpu", "cuda"), "inter"): (1, 2),
        (CUDA, "intra"): (2, 3),
    }


def test_unlike_types_have_one_way_and_like_ones_those_that_both_can_take() -> None:
    both = (DIRECT, STAGED)
    assert link_ways(("cpu", "cuda"), [both, (DIRECT,)]) == (STAGED,)
    assert link_ways(CUDA, [both, both]) == both
    assert link_ways(CUDA, [both, (STAGED,)]) == (STAGED,)


@pytest.mark.parametrize("detour_is_quicker", [True, False])
@on_testkind
def test_where_the_detour_over_the_host_is_quicker_messages_take_it(detour_is_quicker: bool) -> None:
    testkind.is_direct()
    seconds = {DIRECT: 2.0, STAGED: 1.0 if detour_is_quicker else 3.0}

    def timed(table: GroupTable, pair: Any, device: str, is_staged: bool) -> tuple[float, float]:
        return links._BANDWIDTH_BYTES / seconds[STAGED if is_staged else DIRECT], 0.0

    def ask(table: GroupTable) -> Any:
        types, nodes = [NAME] * 3, ["a", "a", "b"]
        table.know_types(types)
        ways = measure_ways(table, nodes, types, NAME)
        known = tuple(way for way in ways if way.where == "inter")
        table.set_links(known, nodes)
        return ways, table.is_staged(PLACE, (0, 1)), table.is_staged(PLACE, (0, 2)), table.is_staged(PLACE)

    with mock.patch.object(links, "_time_pair", timed):
        found = run_in_threads(3, ask)
    assert found[0] == found[1] == found[2]
    ways, *staged = found[0]
    assert {(way.way, way.where) for way in ways} == {(w, p) for w in (DIRECT, STAGED) for p in ("intra", "inter")}
    assert staged == [False, detour_is_quicker, detour_is_quicker]


@on_testkind
def test_what_is_known_of_ways_goes_when_types_are_told_anew() -> None:
    testkind.is_direct()

    def ask(table: GroupTable) -> list[bool]:
        told = []
        for _ in range(2):
            table.know_types([NAME] * 2)
            told.append(table.is_staged(PLACE))
            table.set_links([Way(STAGED, (NAME, NAME), "intra", 1e9)], ["a", "a"])
            told.append(table.is_staged(PLACE))
        return told

    assert run_in_threads(2, ask) == [[False, True] * 2] * 2
