"""Calls get the form that is cheapest on the links, each by its own size."""

import pytest

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.plans import cost
from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import crossover
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.comm_ops.resolve.resolve import resolve
from hetu_fx.errors import ResolveError

FAST, SLOW = Link(1e9, 1e-6), Link(1e7, 1e-4)


def cluster(nodes="aabb", intra=FAST, inter=SLOW):
    return Cluster.on_paper([1e9] * len(nodes), nodes=tuple(nodes), intra=intra, inter=inter)


def form(source, target, topology, choice="auto", shape=(24, 12), rank=0):
    resolution = resolve(parse_annotation(source), parse_annotation(target), shape)
    plain = resolution.calls(rank)[0]
    formed = Lowering(topology, choice).with_algorithm(plain)
    assert formed.args[: len(plain.args)] == plain.args
    return str(formed.args[-1]) if len(formed.args) > len(plain.args) else ""


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("[0-3] P(4)", "[0-3] D(4)"),
        ("[0-3] S(0, 4)", "[0-3] D(4)"),
        ("[0-3] P(4)", "[0-3] S(0, 4)"),
        ("[0-3] D(4)", "[0-3] S(0, 4)"),
        ("[0,1] D(2)", "[2,3] D(2)"),
    ],
)
def test_slow_links_between_nodes_are_crossed_once(source, target):
    assert form(source, target, cluster()).startswith("nodes 0,0,1,1 from ")
    assert form(source, target, cluster(), "flat") == ""
    assert form(source, target, cluster(), "two_level") == "nodes 0,0,1,1 from 0"


@pytest.mark.parametrize("nodes", ["aaaa", "abcd"])
def test_one_node_or_one_rank_per_node_stays_flat(nodes):
    assert form("[0-3] P(4)", "[0-3] D(4)", cluster(nodes), "two_level") == ""
    assert form("[0,1] D(2)", "[2,3] D(2)", cluster(nodes), "two_level") == ""


def test_links_that_are_alike_stay_flat():
    assert form("[0-3] P(4)", "[0-3] D(4)", cluster(inter=FAST)) == ""


def test_the_bound_is_where_the_prices_cross():
    """Two messages over one link in one round, against half of the bytes there and another round inside."""
    least = parse_algorithm(form("[0,1] D(2)", "[2,3] D(2)", cluster(intra=Link(1e9, 1e-2)))).two_level_from
    assert least == 1 << 17
    assert 1e-2 + least / 2 / 1e9 < least / 1e7
    assert 1e-2 + least / 4 / 1e9 > least / 2 / 1e7


def test_crossover_of_affine_prices():
    assert crossover(lambda size: 2 * size, lambda size: 90 + size) == 128
    assert crossover(lambda size: 2 * size, lambda size: size) == 0
    assert crossover(lambda size: size, lambda size: size) is None
    assert crossover(lambda size: size, lambda size: 2 * size) is None


def test_uneven_parts_are_padded_where_that_is_wanted_or_faster(monkeypatch):
    uneven, whole = "[0-3] S(0, 3:2:2:1)", "[0-3] D(4)"
    topology = cluster("aaaa", intra=Link(1e9, 1e-3))
    assert form(uneven, whole, topology) == ""
    assert form("[0-3] S(0, 4)", whole, topology, "padded") == ""
    assert parse_algorithm(form(uneven, whole, topology, "padded")).pads(10**9)
    monkeypatch.setattr(cost, "PADDED_SLOWDOWN", 0.9)
    found = parse_algorithm(form(uneven, whole, topology)).padded_below
    padded, grouped = 0.9 * (1e-3 + found * 1.5 / 4 / 1e9), 1e-3 + found / 4 / 1e9
    assert grouped < padded < 2 * grouped


def test_split_collectives_take_the_form_of_their_largest_group():
    union = "{[0,1] S(1, 2); [2]; [3]}"
    source, target = f"P(3) over {union}", f"D(3) over {union}"
    assert form(source, target, cluster()) == "nodes 0,0,1,1 from 0"
    assert form(source, target, cluster("abcd")) == ""
    assert form(source, target, cluster("aaaa")) == ""


def test_sizes_need_not_be_known():
    assert form("[0-3] P(4)", "[0-3] D(4)", cluster(), shape=(None, 12)).startswith("nodes 0,0,1,1 from ")
    assert form("[0,1] D(2)", "[2,3] D(2)", cluster(), shape=(None, 12)).startswith("nodes 0,0,1,1 from ")


def test_what_cannot_be_chosen_is_refused():
    with pytest.raises(ResolveError, match="no lowering 'fast'\nhint: choose one of auto, flat, two_level, padded"):
        Lowering(cluster(), "fast")
    with pytest.raises(ResolveError, match="'two_level' needs to know the nodes"):
        Lowering(None, "two_level")
