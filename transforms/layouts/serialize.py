"""A deduced graph as bytes, for another process that has captured the same program.

What belongs to the program (nodes, factor classes' map, flow) is written by name, so that the reader's own stand in its
place: what is left are states and decisions, some 300 bytes per node.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping

from torch import fx

from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.errors import StateError
from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.flow import Flow

_NODE, _PART = "node", "part"
Name = tuple[str, str]


def serialize(deduced: DeducedGraph, graph: Graph, factors: FactorMap, flow: Flow) -> bytes:
    """Return a deduced graph of this program as bytes; what a plan has made of the program's map is written whole."""
    file = io.BytesIO()
    _DeducedPickler(file, _parts(graph, factors, flow)).dump(deduced)
    return file.getvalue()


def deserialize(data: bytes, graph: Graph, factors: FactorMap, flow: Flow) -> DeducedGraph:
    """Return the deduced graph of a program that another process has written, on this process's own program.

    Raises:
        StateError: the other process has captured another program.
    """
    deduced: DeducedGraph = _DeducedUnpickler(io.BytesIO(data), graph, _parts(graph, factors, flow)).load()
    return deduced


def _parts(graph: Graph, factors: FactorMap, flow: Flow) -> Mapping[str, object]:
    return {"graph": graph, "factors": factors, "flow": flow}


class _DeducedPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, parts: Mapping[str, object]) -> None:
        super().__init__(file, protocol=5)
        self._names = {id(part): name for name, part in parts.items()}

    def persistent_id(self, value: object) -> Name | None:
        if isinstance(value, fx.Node):
            return _NODE, value.name
        name = self._names.get(id(value))
        return None if name is None else (_PART, name)


class _DeducedUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, graph: Graph, parts: Mapping[str, object]) -> None:
        super().__init__(file)
        self._known = {(_PART, name): part for name, part in parts.items()}
        self._known |= {(_NODE, node.name): node for node in graph.graph.nodes}

    def persistent_load(self, name: Name) -> object:
        if name not in self._known:
            raise StateError(f"a plan was prepared for a graph with {name}, which this process's graph lacks")
        return self._known[name]
