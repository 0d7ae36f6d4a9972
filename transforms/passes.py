"""The visible list of graph passes, in the order in which they run on a captured graph.

What a graph pass is, and how a list of them runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.rewrites.batch_norm import BatchStatistics
from hetu_fx.transforms.rewrites.counter_rng import Randomness
from hetu_fx.transforms.rewrites.global_mean import GlobalMean

GRAPH_PASSES: tuple[GraphPass, ...] = (GlobalMean(), BatchStatistics(), Randomness())


_log = logging.getLogger("hetu_fx.passes")


class GraphPass(Protocol):
    """A frozen value that makes a new graph from a graph and leaves its input untouched."""

    @property
    def name(self) -> str:
        """Return the pass's one name: in logs, on the command line, in test files."""

    def __call__(self, graph: Graph) -> Graph:
        """Return the new graph."""


def run_passes(graph: Graph, passes: Sequence[GraphPass]) -> Graph:
    """Run the passes in order; each result is linted, timed and logged at debug level."""
    for number, graph_pass in enumerate(passes):
        start = perf_counter()
        graph = graph_pass(graph)
        graph.graph.lint()
        _log.debug("%02d %s: %.1f ms", number, graph_pass.name, 1e3 * (perf_counter() - start))
    return graph
