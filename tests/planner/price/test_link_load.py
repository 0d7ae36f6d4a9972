import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.price.link_load import hand_over_line, price_hand_over, resource_loads, ring_traffic, turn_traffic
from hetu_fx.plans.plan import Stage
from tests.planner.examples import paper

TWO_NODES = paper(1, 1, 1, 1, nodes="aabb", inter=Link(1e8))


def test_messages_of_one_node_use_its_devices_and_those_across_their_nodes_links() -> None:
    cluster = paper(1, 1, 1, nodes="aab", inter=Link(1e8))
    assert resource_loads(((0, 1, 1e10), (0, 2, 1e8)), cluster) == {
        ("out", 0): 1.0,
        ("in", 1): 1.0,
        ("out of node", 0): 1.0,
        ("into node", 1): 1.0,
    }


def test_a_cpu_copies_what_it_sends_and_gets() -> None:
    cluster = Cluster.on_paper([1.0, 1.0], nodes="ab", kinds=("cpu", "cpu"), intra=Link(1e9), inter=Link(1e8))
    loads = resource_loads(((0, 1, 1e8),), cluster)
    assert loads["out of node", 0] == 1.0
    assert loads["compute", 0] == loads["compute", 1] == pytest.approx(0.1)


def test_a_ring_sends_all_parts_but_ones_own_each_turn() -> None:
    assert ring_traffic([(0, 1, 2), (4,)], 9.0, 2) == ((0, 1, 12.0), (1, 2, 12.0), (2, 0, 12.0))


def test_in_two_levels_each_byte_crosses_between_nodes_once() -> None:
    crossing = [size for a, b, size in turn_traffic((0, 1, 2, 3), 8.0, 1, TWO_NODES) if {a, b} in ({0, 2}, {1, 3})]
    assert crossing == [2.0] * 4  # half of what each lane has of the whole, both ways
    assert turn_traffic((0, 1), 8.0, 1, TWO_NODES) == ring_traffic([(0, 1)], 8.0, 1)


def test_what_two_devices_of_a_node_get_from_another_is_sent_in_slices_and_gathered() -> None:
    sent = price_hand_over(Stage((0, 1)), Stage((2, 3)), 1e6, TWO_NODES)
    assert sent.rounds == (((0, 2, 0.5), (1, 3, 0.5)), ((2, 3, 0.5), (3, 2, 0.5)))
    assert sent.traffic(0, 10.0) == ((0, 2, 5.0), (1, 3, 5.0))
    line = hand_over_line(Stage((0, 1)), Stage((2, 3)), 1e6, TWO_NODES)
    assert line.slope == pytest.approx(1e6 / 1e8 + 0.5e6 / 1e10)


def test_inside_a_node_each_device_gets_the_whole_from_one_that_has_it() -> None:
    sent = price_hand_over(Stage((0,)), Stage((1,)), 1e6, TWO_NODES)
    assert sent.rounds == (((0, 1, 1.0),),)


def test_a_shard_of_the_sequence_comes_from_its_owners() -> None:
    cluster = paper(1, 1, 1)
    (messages,) = price_hand_over(Stage((0, 1), (2, 1), context=2), Stage((2,)), 3e6, cluster).rounds
    assert messages == ((0, 2, pytest.approx(2 / 3)), (1, 2, pytest.approx(1 / 3)))
