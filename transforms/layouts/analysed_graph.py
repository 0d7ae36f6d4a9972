"""A graph with what its rules say of it: its parallel dimensions, and what its values depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakValueDictionary

from hetu_fx.deduction.factors.analyse import analyse
from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.layouts.flow import Flow, build_flow

if TYPE_CHECKING:
    from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph


@dataclass(frozen=True, eq=False)
class AnalysedGraph:
    """A graph, its factor classes, and what its values depend on.

    Attributes:
        graph, factors, flow: these.
        deduced: what was deduced of it and is in use, by a digest: ranks that are threads of one process share it.
    """

    graph: Graph
    factors: FactorMap
    flow: Flow
    deduced: WeakValueDictionary[bytes, DeducedGraph] = field(default_factory=WeakValueDictionary, init=False)

    def __reduce__(self) -> tuple[type[AnalysedGraph], tuple[Graph, FactorMap, Flow]]:
        return AnalysedGraph, (self.graph, self.factors, self.flow)


@dataclass(frozen=True)
class Analyse:
    """Work out a graph's parallel dimensions (factor classes), and what every value depends on.

    Requires: a captured graph after the rewrites.
    Ensures: every dim of every tensor has its classes; parameters named in `frozen` get no gradient. An op without a
        rule keeps all of its dims whole, with a warning that names it.

        %y: f32[batch, 6] = linear(%x, %w)     ->     %y: (#1) (#2),  #1 the rows of the batch, #2 the first dim of %w
    """

    frozen: frozenset[str] = frozenset()
    name: ClassVar[str] = "analyse"

    def __call__(self, graph: Graph) -> AnalysedGraph:
        return AnalysedGraph(graph, analyse(graph), build_flow(graph, self.frozen))
