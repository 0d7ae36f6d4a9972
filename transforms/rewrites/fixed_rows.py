"""Let a graph that takes one number of rows only have them all on every replica: its inputs are gathered.

What fixes a batch (a model that reads its size in Python, an op that torch traces for one size) runs for all rows on
each replica then, with the sizes that it was traced for. That is what one device computes, whatever the op.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.graph import FixedRows, Graph, Leaf, LeafKind, drop_dead_nodes
from hetu_fx.graph.row_dims import with_rows
from hetu_fx.transforms.rewrites.counter_rng import with_random_state
from hetu_fx.transforms.rewrites.row_ops import insert_placed


def gather_inputs(graph: Graph) -> Graph:
    """Return a graph with a static batch whose inputs have a replica's rows, and are gathered before they are read.

    A graph in which no input has rows is returned as it is.
    """
    fixed = graph.fixed_rows
    if fixed is None:
        return graph
    made, state = with_random_state(graph.clone())
    rows = meta.fresh_size(made.graph, "rows", fixed.number)
    first = next(node for node in made.graph.nodes if node.op != "placeholder")
    leaves = tuple(_cut(leaf, fixed, rows) for leaf in made.leaves)
    for leaf in leaves:
        if leaf.row_dim is not None and leaf.node.users:
            _gather(leaf, fixed.number, state, first)
    drop_dead_nodes(made.graph)
    return made.evolve(leaves=leaves, batch_symbol=meta.expression(rows))


def _cut(leaf: Leaf, fixed: FixedRows, rows: torch.SymInt) -> Leaf:
    """Return an input with a replica's rows."""
    if leaf.kind is not LeafKind.INPUT or leaf.name not in fixed.dims:
        return leaf
    node, dim = leaf.node, fixed.dims[leaf.name]
    shape = with_rows(meta.shape(node), dim, rows)
    meta.set_value(node, meta.fresh_placeholder_value(node.graph, shape, meta.dtype(node), meta.value(node).device))
    return replace(leaf, row_dim=dim)


def _gather(leaf: Leaf, total: int, state: fx.Node, first: fx.Node) -> None:
    """Put all rows in the place of an input."""
    readers = list(leaf.node.users)
    assert leaf.row_dim is not None, "it has rows"
    whole = insert_placed(first, leaf.node, state, total, (leaf.row_dim, 1, 1))
    for reader in readers:
        reader.replace_input_with(leaf.node, whole)
