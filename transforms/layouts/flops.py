"""How much an op computes, as far as its rule tells."""

from __future__ import annotations

import math

from torch import fx

from hetu_fx.deduction.factors.factors import FactorMap, OpFactors
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph


def product_flops(node: fx.Node, op: OpFactors) -> float:
    """Return a multiply-add count: result elements times the factors contracted between operands; 0 for no product."""
    shared = (c for c in op.reduced - op.sharded if sum(c in operand.classes for operand in op.operands) > 1)
    contracted = [c.size or 1 for c in shared]
    return 2.0 * meta.numel(node) * math.prod(contracted) if contracted else 0.0


def travelling_work(graph: Graph, factors: FactorMap) -> tuple[float, ...]:
    """Return what each node of a graph computes with operands that may travel, at the sizes of the example batch."""
    return tuple(_travelling_flops(node, factors) for node in graph.graph.nodes)


def _travelling_flops(node: fx.Node, factors: FactorMap) -> float:
    """Return the FLOPs of the products of queries with keys and of weights with values; causal ones have half."""
    if not factors.is_op(node) or not factors.op(node).travelling:
        return 0.0
    op = factors.op(node)
    keys, values = (meta.hints(op.operands[position].node) for position in sorted(op.travelling))
    is_placed = bool(op.placed) or any(seen.placed for seen in op.apart.values())
    return 2.0 * meta.numel(node) * keys[-2] * (1 + keys[-1] / values[-1]) / (2 if is_placed else 1)
