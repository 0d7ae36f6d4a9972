"""Graphs of the tests as programs whose costs are asked."""

from __future__ import annotations

from typing import Any

from hetu_fx.graph.graph import Graph
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.analysed_graph import Analyse
from hetu_fx.transforms.layouts.work_shares import WorkShares


def analysed(graph: Graph) -> Program:
    """Return a graph as it is, analysed."""
    return Program(Analyse()(graph))


def uncut(graph: Graph) -> dict[str, Any]:
    """Return a program, and that a group shares nothing of it, as `program_costs` takes them."""
    program = analysed(graph)
    return {"program": program, "shares": WorkShares(program.factors, frozenset())}
