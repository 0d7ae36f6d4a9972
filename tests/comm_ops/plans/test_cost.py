"""Costs follow the links: latency per hop, the slowest link of a ring, the busiest end of a message plan."""

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.comm_ops.plans.cost import (
    EqualLinks,
    all_reduce_cost,
    cheapest_all_reduce_cost,
    cheapest_ring_cost,
    messages_cost,
    ring_cost,
    two_level_all_reduce_cost,
    two_level_ring_cost,
)
from hetu_fx.comm_ops.resolve.resolve import resolve


class TwoNodes(EqualLinks):
    """Ranks 0 and 1 in one node, 2 and 3 in another."""

    def bytes_per_second(self, a, b):
        return 100.0 if a // 2 == b // 2 else 10.0

    def latency_seconds(self, a, b):
        return 0.5 if a // 2 == b // 2 else 1.0

    def node_of(self, rank):
        return rank // 2


def seconds(source, target, shape=(100,)):
    return resolve(parse_annotation(source), parse_annotation(target), shape).seconds(1, TwoNodes())


def test_a_ring_is_as_fast_as_its_slowest_link():
    assert ring_cost(100, (0, 1), TwoNodes()) == 0.5 + 50 / 100
    assert ring_cost(100, (0, 1, 2, 3), TwoNodes()) == 3 * (1 + 25 / 10)
    assert all_reduce_cost(100, (0, 1), TwoNodes()) == 2 * ring_cost(100, (0, 1), TwoNodes())


def test_a_ring_that_comes_through_a_node_twice_shares_the_nodes_link_with_itself():
    assert ring_cost(100, (0, 2, 1, 3), TwoNodes()) == 3 * (1 + 2 * 25 / 10)
    assert cheapest_all_reduce_cost(100, (0, 2, 1, 3), TwoNodes()) == two_level_all_reduce_cost(
        100, (0, 1, 2, 3), TwoNodes()
    )


def test_two_levels_cross_between_nodes_once():
    ranks, links = (0, 1, 2, 3), TwoNodes()
    inside, across = ring_cost(100, (0, 1), links), ring_cost(100, (0, 2), links)
    assert two_level_ring_cost(100, ranks, links) == inside + across
    assert two_level_all_reduce_cost(100, ranks, links) == 2 * (inside + across)
    assert two_level_ring_cost(100, (0, 1, 2), links) == inside + across


def test_the_cheapest_all_reduce_is_flat_where_there_is_one_level():
    links = TwoNodes()
    assert cheapest_all_reduce_cost(100, (0, 1, 2, 3), links) == two_level_all_reduce_cost(100, (0, 1, 2, 3), links)
    for ranks in ((0,), (0, 1), (0, 2)):
        assert cheapest_all_reduce_cost(100, ranks, links) == all_reduce_cost(100, ranks, links)
        assert cheapest_ring_cost(100, ranks, links) == ring_cost(100, ranks, links)


def test_messages_between_nodes_share_the_nodes_links():
    assert messages_cost([(0, 2, 100), (1, 3, 100)], TwoNodes()) == 2 * (1 + 10)
    assert messages_cost([(0, 1, 100), (3, 2, 100)], TwoNodes()) == 0.5 + 1


def test_messages_cost_what_the_busiest_device_sends_or_receives():
    assert messages_cost([(0, 1, 100), (0, 2, 100)], TwoNodes()) == (0.5 + 1) + (1 + 10)
    assert messages_cost([], TwoNodes()) == 0


def test_a_resolution_costs_the_sum_of_its_steps():
    assert seconds("[0,1] P(2)", "[0,1] D(2)") == 2 * (0.5 + 0.5)
    assert seconds("[0] ", "[2]") == 1 + 100 / 10
    assert seconds("[0,1] D(2)", "[0,1] S(0, 2)") == 0
    both = seconds("[0-3] P(2) S(0, 2)", "[0-3] D(4)")
    assert both == 2 * ring_cost(50, (0, 2), TwoNodes()) + ring_cost(100, (0, 1), TwoNodes())


def test_groups_that_work_side_by_side_cost_the_slowest():
    apart = "D(2) over {[0,1] P(2); [2,3] P(2)}", "D(2) over {[0,1] D(2); [2,3] S(0, 2)}"
    assert seconds(*apart) == all_reduce_cost(100, (0, 1), TwoNodes())


def test_a_split_collective_costs_its_slowest_slice_group():
    found = seconds("P(2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}")
    assert found == all_reduce_cost(50, (0, 2), TwoNodes())
