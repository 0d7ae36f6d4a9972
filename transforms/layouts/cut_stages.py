"""Cut a graph into pipeline stages.

Ops that both the batch and parameters reach belong to one stage each. Everything else (masks, rotary tables,
transposed weights) belongs to none and is computed wherever it is read, so that it never travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from torch import fx

from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.layouts.flow import Flow


def cut_stages(graph: Graph, flow: Flow, blocks: tuple[int, ...]) -> Mapping[fx.Node, int]:
    """Return the stage of every op that belongs to one; `blocks` is the number of repeated blocks per stage.

    What stands before the first block goes to the first stage, what stands after the last to the last. A model
    without repeated blocks is cut where about even shares of its parameters have been read.
    """
    positions = _by_blocks(graph, blocks) if graph.num_blocks else _by_parameters(graph, flow, len(blocks))
    stages: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and flow.is_mixed(node):
            before = [stages[n] for n in node.all_input_nodes if n in stages]
            stages[node] = max([positions[node], *before])
    _check(stages, len(blocks))
    return stages


def _by_blocks(graph: Graph, blocks: tuple[int, ...]) -> Mapping[fx.Node, int]:
    ends = list(accumulate(blocks))
    last = len(blocks) - 1

    def stage(node: fx.Node) -> int:
        position = graph.position(node)
        if position < 0:
            return 0
        if position == graph.num_blocks - 1 and graph.block_of(node) is None:
            return last
        return next((i for i, end in enumerate(ends) if position < end), last)

    return {node: stage(node) for node in graph.graph.nodes}


def _by_parameters(graph: Graph, flow: Flow, num_stages: int) -> Mapping[fx.Node, int]:
    """Place an op that reads parameters by the middle of them among all, others with the last such op before."""
    leaves = {leaf.node for leaf in graph.leaves}
    seen: set[fx.Node] = set()
    middles: dict[fx.Node, float] = {}
    total, middle = 0, 0.0
    for node in graph.graph.nodes:
        fresh = [n for n in node.all_input_nodes if n in leaves and n in flow.parameters and n not in seen]
        size = sum(map(meta.numel, fresh))
        if size:
            middle = total + size / 2
        seen.update(fresh)
        total += size
        middles[node] = middle
    return {node: min(num_stages - 1, int(num_stages * middle / max(total, 1))) for node, middle in middles.items()}


def _check(stages: Mapping[fx.Node, int], num_stages: int) -> None:
    empty = sorted(set(range(num_stages)) - set(stages.values()))
    if empty:
        raise PlanError(
            f"stage(s) {empty} of {num_stages} would hold no operation of this model; use fewer stages, or move "
            f"blocks to them"
        )
