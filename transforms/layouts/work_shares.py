"""What the devices of a tensor parallel group share of a program: work and values in parts, and what they sum.

The costs of a program for groups are told from it. It is that of two typical devices; larger groups share alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from hetu_fx.deduction.factors.dual_roles import elsewhere
from hetu_fx.deduction.factors.factors import FactorClass, FactorMap
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.annotated_graph import TENSOR, AnnotatedGraph, read_outside
from hetu_fx.transforms.layouts.axis import AxisDeduction, deduce_tensor_axis
from hetu_fx.transforms.layouts.deduce import prices_of
from hetu_fx.transforms.layouts.flow import is_item, whole_of
from hetu_fx.transforms.layouts.sequence_parallel import sequence_classes, sequence_cut
from hetu_fx.transforms.layouts.states import Summed

Split = tuple[tuple[str, int], ...]
"""(parameter, dim) of what groups cut first, as `Plan.split` says it."""


@dataclass(frozen=True, slots=True)
class WorkShares:
    """Factor classes are cut over the devices of a group.

    Attributes:
        factors: what the ops do to classes.
        classes: those that are cut; where there are none, every device does everything.
        summed: the values that are summed over the group.
        returned: the values whose cotangents are.
        in_sequence: the ops that can run on a part of a sequence besides.
    """

    factors: FactorMap
    classes: frozenset[FactorClass]
    summed: frozenset[fx.Node] = frozenset()
    returned: frozenset[fx.Node] = frozenset()
    in_sequence: frozenset[fx.Node] = frozenset()

    @property
    def units(self) -> int:
        """Return the size of the smallest class: no device of a group may be left without a part."""
        return min((factor.size or 1 for factor in self.classes), default=1)

    def shares_work(self, node: fx.Node) -> bool:
        """Tell whether a cut class stands in an operand or a result of the op, and may be cut there."""
        if not self.factors.is_op(node):
            return False
        op = self.factors.op(node)
        present = op.made.union(*(operand.classes for operand in op.operands))
        return not self.classes.isdisjoint(present - op.whole)

    def splits(self, node: fx.Node) -> bool:
        """Tell whether a cut class stands in a dim of the value."""
        return any(not self.classes.isdisjoint(dim) for dim in self.factors.dims(node))

    def sums(self, node: fx.Node) -> bool:
        """Tell whether the value is summed over the group."""
        return node in self.summed

    def returns(self, node: fx.Node) -> bool:
        """Tell whether the value's cotangent is summed over the group."""
        return node in self.returned

    def shares_sequence(self, node: fx.Node) -> bool:
        """Tell whether the op can run on a part of a sequence."""
        return node in self.in_sequence

    def gathered(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the operands that have a class of which the op cuts another dim."""
        apart = self.factors.op(node).apart.items() if self.factors.is_op(node) else ()
        pairs = [(o, factor) for factor, seen in apart if not factor.is_batch for o in seen.operands]
        found = (o.node for o, factor in pairs if elsewhere(factor) in o.classes and factor not in o.classes)
        return tuple(dict.fromkeys(found))


def work_shares(analysed: AnalysedGraph, split: Split = ()) -> WorkShares:
    """Return what a group of two typical devices shares; `split` is what it cuts first, as `Plan.split`.

    Raises `PlanError` where a parameter has no such dim.
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
    return WorkShares(factors, classes, frozenset(later | at_once), frozenset(back), shared)


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
