import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.price.links import loads_of, ring_traffic
from hetu_fx.planner.simulate.jobs import Jobs
from hetu_fx.planner.values.line import Line
from tests.planner.examples import paper


def test_messages_of_one_node_use_its_devices_and_those_across_their_nodes_links() -> None:
    cluster = paper(1, 1, 1, nodes="aab", inter=Link(1e8))
    assert loads_of(((0, 1, 1e10), (0, 2, 1e8)), cluster) == {
        ("out", 0): 1.0,
        ("in", 1): 1.0,
        ("out of node", 0): 1.0,
        ("into node", 1): 1.0,
    }


def test_a_cpu_copies_what_it_sends_and_gets() -> None:
    cluster = Cluster.on_paper([1.0, 1.0], nodes="ab", kinds=("cpu", "cpu"), intra=Link(1e9), inter=Link(1e8))
    loads = loads_of(((0, 1, 1e8),), cluster)
    assert loads["out of node", 0] == 1.0
    assert loads["compute", 0] == loads["compute", 1] == pytest.approx(0.1)


def test_a_ring_sends_all_parts_but_ones_own_each_turn() -> None:
    assert ring_traffic([(0, 1, 2), (4,)], 9.0, 2) == ((0, 1, 12.0), (1, 2, 12.0), (2, 0, 12.0))


def test_devices_that_work_together_are_used_for_their_share_of_the_slowests_time() -> None:
    jobs = Jobs(paper(1, 1))
    number = jobs.do(jobs.compute("forward", {0: 2.0, 1: 1.0}), "forward 0", ())
    activity = jobs.all[number].activity
    assert (activity.seconds, activity.uses) == (2.0, {("compute", 0): 1.0, ("compute", 1): 0.5})


def test_a_transfer_takes_as_long_as_its_busiest_link() -> None:
    jobs = Jobs(paper(1, 1, 1))
    number = jobs.do(jobs.transfer("send", Line(0.5, 0.1), ((0, 1, 1e9), (0, 2, 1e10))), "send 0", ())
    activity = jobs.all[number].activity
    assert (activity.latency_seconds, activity.seconds) == (0.5, pytest.approx(1.1))
    assert activity.uses["in", 1] == pytest.approx(0.1 / 1.1)
    assert jobs.all[number].task.devices == (0,)
