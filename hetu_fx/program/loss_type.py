"""What the loss of a captured graph is by its rules: only what is proven to be a sum over rows may be shared out.

How values grow with the number of rows: what a loss is, a sum over rows or a mean, is proven by this. A value has
degree d if it is n ** d times as large on a batch in which every row stands n times. A count of rows has degree 1, a
sum over rows one more than what is summed, a quotient the difference: a mean has degree 0. Degrees follow from the
rules alone: what an op is linear in, what it divides by, what it sums. Where these say nothing, there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from torch import fx

from hetu_fx.deduction.factors.factors import FactorMap, OpFactors
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.axis import AxisDeduction
from hetu_fx.transforms.layouts.states import Summed

Degrees = Mapping[fx.Node, int | None]


def _row_degrees(graph: Graph, factors: FactorMap) -> Degrees:
    """Return the degree of every tensor of a graph, None where it is not known; of what is no tensor, nothing."""
    degrees: dict[fx.Node, int | None] = {
        leaf.node: 1 if leaf.kind is LeafKind.COUNT else 0 for leaf in graph.leaves if meta.is_tensor(leaf.node)
    }
    for node in graph.graph.nodes:
        if node.op == "call_function" and factors.is_op(node):
            degrees[node] = None if _counts_rows(node, factors.op(node), graph) else _degree(factors.op(node), degrees)
    return degrees


def _counts_rows(node: fx.Node, op: OpFactors, graph: Graph) -> bool:
    """Tell whether an op reads a number that depends on the rows, other than as a size, or the rows of all replicas."""
    numbers = any(meta.depends_on_batch(number, graph) for _, number in op.numbers_of(node))
    return numbers or any(meta.depends_on_all_rows(value, graph) for value in (node, *node.all_input_nodes))


def _degree(op: OpFactors, degrees: Degrees) -> int | None:
    read = {i: degrees.get(o.node) for i, o in enumerate(op.operands) if i not in op.unread}
    if None in read.values() or op.rows_meet:
        return None
    base = _base(op, {i: degree for i, degree in read.items() if degree is not None})
    sums_rows = any(factor.is_batch for factor in op.reduced)
    return None if base is None else base + sums_rows


def _base(op: OpFactors, degrees: Mapping[int, int]) -> int | None:
    """Return the degree of what an op makes of one row, from those of its operands."""
    growing = frozenset(i for i, degree in degrees.items() if degree)
    if not growing:
        return 0
    jointly = [group for group in op.linear if growing <= group]
    if any(len({degrees.get(i, 0) for i in group}) == 1 for group in jointly):
        return degrees[min(growing)]
    alone = frozenset(i for i in growing if frozenset({i}) in op.linear)
    inverse = op.traits.inverse & growing
    if growing != alone | inverse:
        return None
    return sum(degrees[i] for i in alone) - sum(degrees[i] for i in inverse)


class LossType(Enum):
    """How a loss comes of the rows of a batch."""

    SUM = "a sum over rows"  # what replicas make of their rows adds up, and grows with their number
    MEAN = "a mean over rows"  # what they make adds up to it, by counts of the whole batch
    NEITHER = "neither a sum nor a mean over rows"


def loss_type(analysed: AnalysedGraph, rows: AxisDeduction | None) -> LossType:
    """Return what a graph's loss is; NEITHER where there is none, or `rows` are not known to add up to it."""
    loss = analysed.graph.loss
    if loss is None or rows is None or not isinstance(rows.states.get(loss), Summed):
        return LossType.NEITHER
    degree = _row_degrees(analysed.graph, analysed.factors).get(loss)
    return {1: LossType.SUM, 0: LossType.MEAN}.get(degree, LossType.NEITHER)  # type: ignore[arg-type]
