"""Deduce how every value of an annotated graph lies, on the batch axis and on the tensor axis."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from hetu_fx.deduction.factors import FactorClass
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import OutputKind
from hetu_fx.transforms.axis import AxisDeduction, Splits, deduce_axis
from hetu_fx.transforms.context import check_shared, context_cut
from hetu_fx.transforms.deduced import DeducedGraph
from hetu_fx.transforms.sequence import UNCUT, SequenceCut, sequence_cut
from hetu_fx.transforms.stages import AnnotatedGraph
from hetu_fx.transforms.states import Summed


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

        def tensor(splits: Splits, cut: SequenceCut) -> AxisDeduction:
            return deduce_axis(graph, factors, flow, splits, keep_sums=False, may_gather=True, cut=cut)

        batch = deduce_axis(graph, factors, flow, rows, keep_sums=True, may_gather=False)
        if not annotated.runs_in_step:
            _check_sums(annotated, batch)
        excluded, nothing = frozenset(batch.talking()), frozenset[FactorClass]()
        whole = tensor(nothing, UNCUT)
        context = tensor(nothing, context_cut(annotated, excluded)) if annotated.context_layouts else whole
        check_shared(annotated, context)
        return DeducedGraph(
            annotated,
            batch=batch,
            tensor_split=tensor(annotated.classes, sequence_cut(annotated, excluded)),
            tensor_whole=whole,
            context=context,
        )


def _check_sums(annotated: AnnotatedGraph, batch: AxisDeduction) -> None:
    """Refuse sums over the batch in the middle of a model, or in its buffers, that runs in stages or micro-batches."""
    updates = [node for _, node in annotated.graph.outputs_of(OutputKind.BUFFER_UPDATE)]
    summed = (node for node in updates if isinstance(batch.states.get(node), Summed))
    node = next(chain(batch.talking(), summed), None)
    if node is not None:
        raise PlanError(
            f"'{node.name}' ({meta.source_line(node)}) needs a sum over the whole batch in the middle of the model, "
            f"which pipeline stages and micro-batches cannot give; use a plan whose pipelines have one stage and one "
            f"micro-batch"
        )
