"""Plans on links: relays where the link between nodes is what costs."""

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves, plan_on_links, price_plan

MOVE = TensorMove(parse_annotation("[0,1] D(2)"), parse_annotation("[2,3] D(2)"), (1000,), 4)


def two_nodes(inter, intra=None):
    return Cluster.on_paper([1e9] * 4, nodes=("a", "a", "b", "b"), intra=intra or Link(1e9), inter=inter)


def test_receivers_share_what_comes_over_a_slow_link():
    cluster = two_nodes(Link(1e6))
    direct, shared = (plan_moves([MOVE], node_of=cluster.node_of, relays=relays) for relays in (False, True))
    assert plan_on_links([MOVE], cluster) == shared
    assert price_plan(direct, cluster) == 2 * 4000 / 1e6
    assert price_plan(shared, cluster) == 4000 / 1e6 + 2000 / 1e9


def test_they_do_not_where_another_round_costs_more():
    assert plan_on_links([MOVE], two_nodes(Link(1e9), Link(1e9, 1.0))).relay is None


def test_without_links_nothing_is_shared():
    assert plan_on_links([MOVE], None).relay is None
