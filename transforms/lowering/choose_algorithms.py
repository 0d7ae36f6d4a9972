"""Choose the algorithm of every communication op of a device graph, by the links between its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.transforms.lowering.graph_traffic import comm_call, communications
from hetu_fx.transforms.specialize.device_graph import DeviceGraph


@dataclass(frozen=True)
class ChooseAlgorithms:
    """Let every communication op say by which algorithm it runs; changes the graph in place.

    Requires: a device graph.
    Ensures: ops of ranks on several nodes carry their algorithm where another than the flat one is cheaper; without
        links, or on one node, the graph is as it was.

        %all_reduce = hetu.all_reduce(%linear, [0, 1, 2, 3], 'duplicate')
            ->  %all_reduce = hetu.all_reduce(%linear, [0, 1, 2, 3], 'duplicate', 'nodes 0,0,1,1 from 65536')
    """

    lowering: Lowering
    name: ClassVar[str] = "choose_algorithms"

    def __call__(self, device: DeviceGraph) -> DeviceGraph:
        for node in communications(device):
            call = comm_call(node)
            algorithm: Any = self.lowering.with_algorithm(call).args[len(call.args) :]
            node.args = (*node.args, *algorithm)
        return device
