"""The profile of a captured program: its costs, counted, with what else planning needs to know of it."""

from __future__ import annotations

from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.planner.cut import Cut
from hetu_fx.planner.profile import program_costs
from hetu_fx.planner.profile_file import Profile


def captured_profile(graph: Graph, *, cut: Cut | None = None, mixes_rows: bool = False) -> Profile:
    """Return the profile of a captured program, for rows as its example batch has them.

    Args:
        graph: the program.
        cut: what a tensor parallel group would cut; None: nothing.
        mixes_rows: whether rows meet in it.
    """
    costs = program_costs(graph, cut=cut)
    return Profile(costs, tokens_per_row=row_length(graph), source="estimate", mixes_rows=mixes_rows)


def row_length(graph: Graph) -> int:
    """Return the largest size of the example that the graph leaves open, rows aside: the sequence length, or 0."""
    nodes = (leaf.node for leaf in graph.leaves_of(LeafKind.INPUT))
    sizes = [size for node in nodes if meta.is_tensor(node) for size in meta.shape(node)]
    is_open = (size for size in sizes if meta.is_symbolic(size) and meta.expression(size) != graph.batch_symbol)
    return max(map(meta.hint, is_open), default=0)
