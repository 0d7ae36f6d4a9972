"""All graph passes in one list, in the order in which they run, and the one function that runs them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Protocol, TypeVar

from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.layouts.analysed_graph import Analyse
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.deduce import Deduce
from hetu_fx.transforms.lowering.block_modules import BlockModules
from hetu_fx.transforms.lowering.choose_algorithms import ChooseAlgorithms
from hetu_fx.transforms.lowering.overlap_products import Overlap
from hetu_fx.transforms.lowering.recompute import Recompute
from hetu_fx.transforms.lowering.recomputing_module import RecomputingModule
from hetu_fx.transforms.lowering.units import Units
from hetu_fx.transforms.lowering.weights_later import WeightsLater
from hetu_fx.transforms.rewrites.all_rows import AllRows
from hetu_fx.transforms.rewrites.counter_rng import Randomness
from hetu_fx.transforms.rewrites.counts import CountChecks
from hetu_fx.transforms.rewrites.global_mean import BatchStatistics, GlobalMean
from hetu_fx.transforms.rewrites.op_overrides import OpOverrides, Override
from hetu_fx.transforms.rewrites.per_sequence import PerSequence
from hetu_fx.transforms.show import show_stage
from hetu_fx.transforms.specialize.place import Place
from hetu_fx.transforms.specialize.specialize import Specialize

Given = TypeVar("Given", contravariant=True)
Made = TypeVar("Made", covariant=True)
In = TypeVar("In")
Out = TypeVar("Out")


class Pass(Protocol[Given, Made]):
    """A frozen value that makes the next stage of a graph from one; its fields are its options.

    Its docstring says what it does, what it requires, what it ensures, and shows it. What it is given stays as it was;
    only the graph of one device is changed in place, which nobody else has.
    """

    name: ClassVar[str]
    """The pass's one name: in logs, in dumps, on the command line, in tests."""

    def __call__(self, graph: Given, /) -> Made:
        """Return the next stage."""


REWRITES: tuple[Pass[Graph, Graph], ...] = (
    GlobalMean(),
    BatchStatistics(),  # after means: both divide by global counts, which are numbered in this order
    CountChecks(),  # after means, whose counts are numbered first
    AllRows(),  # after all three: rows that only add up need not be gathered
    Randomness(),
    Override(),  # after what writes ops anew that it may name
    PerSequence(),  # after dropout of attention weights is written out, which sequences do not run with
)
"""Passes that need nothing but a captured graph."""


def rewrites_for(overrides: OpOverrides) -> tuple[Pass[Graph, Graph], ...]:
    """Return the passes from graph to graph, of which one runs ops as these overrides say."""
    return tuple(Override(overrides) if isinstance(one, Override) else one for one in REWRITES)


PASSES: tuple[type[Pass[Any, Any]], ...] = (
    *map(type, REWRITES),
    Analyse,  # Graph -> AnalysedGraph
    Annotate,  # -> AnnotatedGraph: here a plan comes in
    Deduce,  # -> DeducedGraph: the last that is equal on all ranks
    Specialize,  # -> DeviceGraph
    Place,  # before recomputation, which counts ops
    ChooseAlgorithms,  # before recomputation, which moves communication about
    Recompute,
    WeightsLater,  # after recomputation, which finds weights by the ops that read them
    Overlap,  # after both, which look for products
    RecomputingModule,  # -> GraphModule, which is run as it is or compiled
    BlockModules,  # of those that are compiled, and those whose parameters are gathered unit by unit
    Units,  # of the latter: after what cuts them
)
"""All passes, in their order: each takes what the one before it makes."""

DUMP_VARIABLE = "HETU_FX_DUMP_PASSES"
"""Names the folder into which every pass writes what it made, as text."""

_log = logging.getLogger("hetu_fx.passes")


def run_pass(graph_pass: Pass[In, Out], graph: In) -> Out:
    """Run one pass; it is timed and logged at debug level, its result checked, and dumped where that is asked for."""
    start = perf_counter()
    made = graph_pass(graph)
    if isinstance(made, Graph):
        made.graph.lint()
    _log.debug("%02d %s: %.1f ms", _number(graph_pass), graph_pass.name, 1e3 * (perf_counter() - start))
    if folder := os.environ.get(DUMP_VARIABLE):
        _dump(Path(folder), graph_pass.name, made)
    return made


def run_rewrites(graph: Graph, passes: Sequence[Pass[Graph, Graph]] = REWRITES) -> Graph:
    """Run passes from graph to graph, one after another."""
    for graph_pass in passes:
        graph = run_pass(graph_pass, graph)
    return graph


def _number(graph_pass: Pass[Any, Any]) -> int:
    return [known.name for known in PASSES].index(graph_pass.name)


def _dump(folder: Path, name: str, made: object) -> None:
    """Write the text of what a pass made; files are numbered as they come, in a folder for each rank."""
    own = folder / f"rank{os.environ.get('RANK', '0')}"
    own.mkdir(parents=True, exist_ok=True)
    (own / f"{len(list(own.iterdir())):03d}_{name}.txt").write_text(f"{show_stage(made)}\n")
