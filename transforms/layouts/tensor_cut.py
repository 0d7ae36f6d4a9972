"""What a tensor parallel group of two typical devices would cut and sum in a program, for the planner's costs."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.annotated_graph import TENSOR, AnnotatedGraph, read_outside
from hetu_fx.transforms.layouts.axis import AxisDeduction, deduce_tensor_axis
from hetu_fx.transforms.layouts.deduce import prices_of
from hetu_fx.transforms.layouts.flow import is_item, whole_of
from hetu_fx.transforms.layouts.sequence_parallel import sequence_classes, sequence_cut
from hetu_fx.transforms.layouts.states import Summed
from hetu_fx.transforms.layouts.work_shares import FactorCut


def tensor_cut(analysed: AnalysedGraph, split: tuple[tuple[str, int], ...] = ()) -> FactorCut:
    """Return what a group cuts, which values and cotangents it sums, and what it does in parts of a sequence.

    `split` is what it cuts first, as `Plan.split`. Raises `PlanError` where a parameter has no such dim.
    """
    plan = replace(Plan.tensor_parallel((0, 1)), split=split)
    graph, factors, flow = analysed.graph, analysed.factors, analysed.flow
    annotated = Annotate(plan, wants_values=False)(analysed)
    classes, outside = annotated.classes, read_outside(annotated)
    axis = deduce_tensor_axis(graph, factors, flow, classes, prices_of(annotated, TENSOR), outside=outside)
    needs = [need for decision in axis.decisions.values() for need in decision.needs]
    later = {need.node for need in needs if _is_summed(axis, need.node) and not isinstance(need.state, Summed)}
    at_once = {node for node, made in axis.made.items() if isinstance(made, Summed) and not _is_summed(axis, node)}
    back = {need.node for need in needs if need.summed_cotangent} - axis.summed_cotangents
    shared = _shared(annotated, axis, outside)
    return FactorCut(factors, classes, frozenset(later | at_once), frozenset(back), shared)


def _is_summed(axis: AxisDeduction, node: fx.Node) -> bool:
    return isinstance(axis.states[node], Summed)


def _shared(annotated: AnnotatedGraph, axis: AxisDeduction, outside: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Return the ops that the group would run on parts of a sequence if it shared that."""
    graph, factors, flow = annotated.graph, annotated.factors, annotated.flow
    sequence = sequence_classes(graph, factors, flow, annotated.classes)
    plan = replace(annotated.plan, sequence_parallel=True)
    cut = sequence_cut(replace(annotated, plan=plan, sequence=sequence), frozenset(), outside)
    return frozenset(node for node, classes in cut.ops.items() if classes and _runs_whole(axis, node))


def _runs_whole(axis: AxisDeduction, node: fx.Node) -> bool:
    return axis.decisions[whole_of(node) if is_item(node) else node].factor is None
