"""Hand-over between two stages of two ranks on two nodes: the same values with and without relays."""

import pytest
import torch

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.plans.schedule import actions
from hetu_fx.switching.step.stage_p2p import Ends, StageP2P
from hetu_fx.transforms.specialize.device_graph import Handover, Value

LAYOUTS = [("[0,1] D(2)", "[2,3] D(2)"), ("[0,1] S(1, 2)", "[2,3] D(2)"), ("[0,1] D(2)", "[2,3] S(0, 1:3)")]


def two_nodes(slow):
    inter = Link(1e6 if slow else 1e12, 0.0 if slow else 1.0)
    return Cluster.on_paper([1e9] * 4, nodes=("a", "a", "b", "b"), intra=Link(1e9), inter=inter)


def part(annotation, value, rank):
    for dim, intervals in enumerate(annotation.region(rank, tuple(value.shape)).dims):
        value = torch.cat([value.narrow(dim, start, stop - start) for start, stop in intervals], dim)
    return value


def hand_over(handover, value, rank, topology):
    """Hand `value` forward and its double back, and compare what arrives."""
    table = GroupTable(name=f"handover {topology is None}")
    table.topology = topology
    source, target = handover.value.annotation, handover.target_annotation
    sends, device = source.holds(rank), torch.device("cpu")
    ends = Ends([] if sends else [handover], [handover] if sends else [])
    p2p = StageP2P(int(not sends), [ends], table, device)
    p2p.start(tuple(actions("1f1b", stage, 2, 1) for stage in range(2)))
    with using(table):
        if sends:
            p2p.receive({})
            p2p.send({"x": part(source, value, rank)}, {})
            found = p2p.receive_back({})["x"]
            assert torch.equal(found, 2 * part(source, value, rank))
        else:
            found = p2p.receive({})["x"]
            assert torch.equal(found, part(target, value, rank))
            p2p.send({}, {})
            p2p.receive_back({})
            p2p.send_back({"x": 2 * found}, {})
        p2p.finish()


def check_hand_over(rank, world, folder):
    value = torch.arange(48.0).view(8, 6)
    for source, target in LAYOUTS:
        layout = Value("x", (8, 6), torch.float32, True, parse_annotation(source))
        handover = Handover(layout, (0, 0), (0, 1), parse_annotation(target))
        for topology in (None, two_nodes(slow=True), two_nodes(slow=False)):
            hand_over(handover, value, rank, topology)


@pytest.mark.distributed
@pytest.mark.timeout(250)
def test_stages_on_two_nodes_hand_over_with_and_without_relays(gloo_checks):
    assert gloo_checks(__file__, 4)["check_hand_over"] == [None] * 4
