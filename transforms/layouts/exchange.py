"""Attention of devices that share a sequence by an exchange of tokens for heads (Jacobs et al., DeepSpeed Ulysses).

Before attention each device has some tokens of all heads, within it all tokens of some heads, after it its tokens
again. Nothing here knows what heads are: it is the class, not the rows, that all that attention compares has in common
with its result, so that parts of it are computed by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass, FactorMap, OpFactors
from hetu_fx.errors import PlanError
from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph


def exchanged_classes(graph: Graph, factors: FactorMap) -> frozenset[FactorClass]:
    """Return what devices that share a sequence have parts of within attention."""
    ops = (factors.op(node) for node in graph.graph.nodes if factors.is_op(node))
    found = (class_apart(op, factors) for op in ops if op.travelling)
    return frozenset(factor for factor in found if factor is not None)


def exchanged_ops(annotated: AnnotatedGraph, excluded: frozenset[fx.Node]) -> Mapping[fx.Node, FactorClass]:
    """Return the ops that run on all tokens and a part of another class, if the plan asks for that.

    Raises:
        PlanError: it does, but no op can.
    """
    if annotated.plan.attention != "heads":
        return {}
    factors = annotated.factors
    nodes = [n for n in annotated.graph.graph.nodes if factors.is_op(n) and factors.op(n).travelling]
    pairs = ((node, class_apart(factors.op(node), factors)) for node in nodes if node not in excluded)
    found = {node: factor for node, factor in pairs if factor is not None}
    if not found or any(stage.is_grid for *_, stage in annotated.plan.stages):
        why = "tensor parallel groups split the heads already" if found else "it is written out in products"
        raise PlanError(
            f"the plan's attention is 'heads', but attention cannot be cut by heads here: {why}"
            f"\nhint: give 'gathered', or leave attention out"
        )
    return found


def class_apart(op: OpFactors, factors: FactorMap) -> FactorClass | None:
    """Return the largest class that stands in the result and in all that is compared; None if there is none."""
    compared = [op.operands[0].classes, *(op.operands[position].classes for position in op.travelling)]
    common = op.made.intersection(*compared) - op.whole - op.sharded
    able = [c for c in common if not c.is_batch and c.size is not None and factors.splittable(c)]
    return max(able, key=lambda c: (c.size or 0, -c.id), default=None)
