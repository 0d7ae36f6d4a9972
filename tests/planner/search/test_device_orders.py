import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.device_orders import Space, alone, compositions, equal_sizes, orders, ranks_by_node
from hetu_fx.planner.search.malleus.mapping import order_ranks
from hetu_fx.planner.values.options import PlanOptions
from tests.planner.examples import paper


def test_compositions_are_all_ordered_sums() -> None:
    assert set(compositions(3, 3, 3)) == {(3,), (1, 2), (2, 1), (1, 1, 1)}
    assert set(compositions(3, 2, 2)) == {(1, 2), (2, 1)}
    assert len(compositions(8, 8, 8)) == 2**7
    assert compositions(3, 1, 2) == ()


def test_equal_sizes_are_the_divisors() -> None:
    assert equal_sizes(6, 3, 6) == ((1,) * 6, (2,) * 3, (3, 3))
    assert equal_sizes(6, 6, 2) == ((3, 3), (6,))


def test_replicas_keep_the_order_of_devices() -> None:
    assert set(Space(2, 2).replicas((7, 5, 3))) == {((7,), (5, 3)), ((7, 5), (3,))}
    assert set(Space(4, 4, exhaustive=False).replicas((7, 5, 3, 1))) == {
        ((7,), (5,), (3,), (1,)),
        ((7, 5), (3, 1)),
        ((7, 5, 3, 1),),
    }


def test_orders_go_by_speed_by_node_and_fast_beside_slow() -> None:
    found = orders(paper(4, 1, 3, 2, nodes="abba"))
    assert found == ((0, 2, 3, 1), (1, 3, 2, 0), (0, 3, 2, 1), (0, 1, 2, 3))


def test_equal_devices_have_one_order_and_its_reverse() -> None:
    assert orders(paper(1, 1, 1))[0] == (0, 1, 2)
    assert len(orders(paper(1))) == 1


def test_slowed_devices_count_as_slow() -> None:
    assert orders(paper(2, 2, 2).with_rates({0: 10}))[0] == (1, 2, 0)


def test_nodes_alone_are_searched_only_when_there_are_several() -> None:
    assert alone(paper(1, 1)) == ()
    assert [part.ranks for part in alone(paper(1, 1, 1, nodes="aba"))] == [(0, 2), (1,)]


def test_options_that_cannot_be_are_refused() -> None:
    assert PlanOptions(micro_batches=(4, 1, 4)).micro_batches == (1, 4)
    with pytest.raises(PlanError, match=r"micro_batches to choose from are \(0, 1\)\nhint: give numbers from 1"):
        PlanOptions(micro_batches=(1, 0))
    with pytest.raises(PlanError, match=r"memory_fraction is 1\.5\nhint: give a number above 0, up to 1"):
        PlanOptions(memory_fraction=1.5)


def test_ranks_of_a_node_stand_below_one_switch_first() -> None:
    levels = [
        {"within": "switch", "bytes_per_second": 4e11},
        {"within": "node", "bytes_per_second": 1e11},
        {"within": "cluster", "bytes_per_second": 1e10},
    ]
    facts = {"flops_per_second": 1e12, "memory_bytes": 1 << 30}
    devices = [{"rank": r, "node": str(r // 4), "place": {"switch": str(r % 2)}, **facts} for r in range(8)]
    cluster = Cluster.from_json({"format": "hetu_fx.cluster/1", "devices": devices, "levels": levels})
    assert ranks_by_node(cluster.devices, cluster) == {"0": [0, 2, 1, 3], "1": [4, 6, 5, 7]}
    ranks = ranks_by_node(cluster.devices, cluster)["0"]
    assert order_ranks(ranks, dict.fromkeys(ranks, 1.0), {}) == ranks
