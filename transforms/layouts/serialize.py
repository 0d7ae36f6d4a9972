"""A deduced graph as bytes, for another process that has captured the same program.

What belongs to the program (nodes, factor classes' map, flow) is written by name, so that the reader's own stand in its
place: what is left are states and decisions.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetu_fx.comm_ops.wire.objects.codec import decode, write
from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.errors import StateError
from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.flow import Flow


def serialize(deduced: DeducedGraph, graph: Graph, factors: FactorMap, flow: Flow) -> bytes:
    """Return a deduced graph of this program as bytes; what a plan has made of the program's map is written whole."""
    return write(deduced, {id(part): name for name, part in _parts(graph, factors, flow).items()})


def deserialize(data: bytes, graph: Graph, factors: FactorMap, flow: Flow) -> DeducedGraph:
    """Return the deduced graph of a program that another process has written, on this process's own program.

    Raises:
        StateError: the other process has captured another program.
        CommError: these are no such bytes.
    """
    deduced: DeducedGraph = decode(data, "the graph of a plan", _Parts(_parts(graph, factors, flow)))
    return deduced


def _parts(graph: Graph, factors: FactorMap, flow: Flow) -> Mapping[str, object]:
    return {"the graph": graph, "factors": factors, "flow": flow} | {f"node {node}": node for node in graph.graph.nodes}


class _Parts(dict[str, object]):
    """What belongs to this process's program, by name."""

    def __missing__(self, name: str) -> object:
        raise StateError(f"a plan was prepared for a graph with {name}, which this process's graph lacks")
