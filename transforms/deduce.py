"""Deduce how every value of an annotated graph lies, on the batch axis and on the tensor axis."""

from __future__ import annotations

from dataclasses import dataclass

from hetu_fx.transforms.axis import AxisDeduction, Splits, deduce_axis
from hetu_fx.transforms.stages import AnnotatedGraph, DeducedGraph


@dataclass(frozen=True)
class Deduce:
    """Deduce the state of every value on both axes.

    Requires: an annotated graph.
    Ensures: every op has a decision on each axis, every value a state; sums over the batch stay open to the end.
    """

    name: str = "deduce"

    def __call__(self, annotated: AnnotatedGraph) -> DeducedGraph:
        graph, factors, flow = annotated.graph, annotated.factors, annotated.flow
        rows = frozenset(c for c in factors.classes if c.is_batch) if annotated.splits_batch else frozenset()

        def axis(splits: Splits, *, keep_sums: bool, may_gather: bool) -> AxisDeduction:
            return deduce_axis(graph, factors, flow, splits, keep_sums=keep_sums, may_gather=may_gather)

        return DeducedGraph(
            annotated,
            batch=axis(rows, keep_sums=True, may_gather=False),
            tensor_split=axis(annotated.classes, keep_sums=False, may_gather=True),
            tensor_whole=axis(frozenset(), keep_sums=False, may_gather=True),
        )
