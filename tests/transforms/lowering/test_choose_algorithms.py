"""Device graphs say by which algorithm their communication runs."""

from types import SimpleNamespace

import torch
from torch import fx

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.transforms.lowering.choose_algorithms import ChooseAlgorithms

TWO_NODES = Cluster.on_paper([1e9] * 4, nodes=("a", "a", "b", "b"), intra=Link(1e9), inter=Link(1e7))


def graph_of(ranks):
    graph = fx.Graph()
    x = graph.placeholder("x")
    summed = graph.call_function(torch.ops.hetu.all_reduce.default, (x, ranks, "duplicate"))
    graph.output(graph.call_function(torch.ops.aten.sin.default, (summed,)))
    return graph


def args_after(ranks, lowering):
    graph = graph_of(ranks)
    ChooseAlgorithms(lowering)(SimpleNamespace(graph=graph))
    graph.lint()
    return [node.args[1:] for node in graph.nodes if node.op == "call_function"]


def test_ops_over_several_nodes_carry_their_algorithm():
    assert args_after([0, 1, 2, 3], Lowering(TWO_NODES)) == [
        ([0, 1, 2, 3], "duplicate", "nodes 0,0,1,1 from 0"), ()
    ]  # fmt: skip


def test_other_ops_stay_as_they_are():
    assert args_after([0, 1], Lowering(TWO_NODES)) == [([0, 1], "duplicate"), ()]
    assert args_after([0, 1, 2, 3], Lowering()) == [([0, 1, 2, 3], "duplicate"), ()]
