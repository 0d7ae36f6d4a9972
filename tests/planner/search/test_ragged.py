import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.search.ragged import lacking
from hetu_fx.planner.values.options import PlanOptions
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=16, rows=32, length=512, width=1024, units=8)


def of(nodes: str, *speeds: float, memory_bytes: int = 1 << 40) -> Cluster:
    return paper(*(speeds or [1000] * len(nodes)), nodes=nodes, inter=Link(1e9, 1e-5), memory_bytes=memory_bytes)


def test_nodes_lack_what_the_largest_of_their_kind_has_more() -> None:
    added = lacking(of("aaaabbbbccc"))
    assert [(device.rank, device.node) for device in added] == [(11, "c")]
    assert not lacking(of("aaaabbbb"))
    assert not lacking(of("aaaabbbb", *[1000] * 4, *[300] * 4))


def test_nodes_that_lack_much_are_not_taken_for_full() -> None:
    assert not lacking(of("aaaaaaaab"))


def test_all_devices_work_where_a_node_has_lost_one() -> None:
    memory_bytes = int(1.2 * COSTS.whole.parameter_bytes)  # eight devices hold a model with its states, not four
    cluster, options = of("aaaabbbbccccddd", memory_bytes=memory_bytes), PlanOptions(zero=0)
    mended = make_plan(COSTS, cluster, search="ragged", options=options)
    even = make_plan(COSTS, cluster, search="homogeneous", options=options)
    assert mended.predicted is not None
    assert even.predicted is not None
    assert len(mended.devices) == 15
    assert mended.predicted.seconds < even.predicted.seconds
    assert make_plan(COSTS, cluster, options=options).predicted == mended.predicted


def test_full_nodes_are_refused() -> None:
    with pytest.raises(PlanError, match="all nodes of a kind have as many devices"):
        make_plan(COSTS, of("aaaabbbb"), search="ragged")
