import pytest

from hetu_fx.cluster.cluster import Cluster, Collective, Link
from hetu_fx.planner.search.hap.prices import Collectives

LINK = Link(1e9, 1e-5)


def cluster(*timed: Collective, nodes: str = "") -> Cluster:
    plain = Cluster.on_paper([1e9, 1e9], nodes=nodes, intra=LINK)
    return Cluster(plain.devices, plain.intra, plain.inter, timed)


def test_collectives_that_were_timed_count_and_the_others_follow_from_the_links() -> None:
    found = Collectives.of_cluster(cluster(Collective("grouped_all_gather", "intra", 2, 5e8, 1e-3)))
    assert found.grouped_all_gather is not None
    assert found.grouped_all_gather(1e6) == pytest.approx(1e-3 + 1e6 / 5e8)
    assert found.shift == Collectives.of_cluster(cluster()).shift
    assert found.all_reduce(1e6) == pytest.approx(2 * found.grouped_all_gather(1e6))


def test_collectives_of_other_devices_than_all_do_not_count() -> None:
    timed = (Collective("all_reduce", "intra", 2, 5e8), Collective("all_gather", "inter", 3, 5e8))
    assert Collectives.of_cluster(cluster(*timed, nodes="ab")) == Collectives.of_cluster(cluster(nodes="ab"))
