"""What the devices of a tensor parallel group share of a program: work and values in parts, and what they sum.

The costs of a program for groups are told from it. It is that of two typical devices; larger groups share alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, takewhile

from torch import fx

from hetu_fx.deduction.factors.dual_roles import elsewhere
from hetu_fx.deduction.factors.factors import FactorClass, FactorMap
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.annotate import Annotate, classes_to_split, finer_than
from hetu_fx.transforms.layouts.annotated_graph import FINE, TENSOR, AnnotatedGraph, read_outside
from hetu_fx.transforms.layouts.axis import AxisDeduction, deduce_tensor_axis
from hetu_fx.transforms.layouts.deduce import axis_prices
from hetu_fx.transforms.layouts.exchange import class_apart
from hetu_fx.transforms.layouts.flow import is_item, tuple_producer
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
        coarse: those that are cut in `parts` alone, each of which several devices hold; groups are larger than that.
        parts: see `coarse`; groups have whole multiples of it.
        most: the most devices that a group may have; None: as `classes` have parts.
        added_late: parameters that several devices hold, of whose gradients each has a summand.
        asked: (parameter, dim) of what is to be cut first.
    """

    factors: FactorMap
    classes: frozenset[FactorClass]
    summed: frozenset[fx.Node] = frozenset()
    returned: frozenset[fx.Node] = frozenset()
    in_sequence: frozenset[fx.Node] = frozenset()
    coarse: frozenset[FactorClass] = frozenset()
    parts: int = 1
    most: int | None = None
    added_late: frozenset[fx.Node] = frozenset()
    asked: Split = ()

    @property
    def units(self) -> int:
        """Return the size of the smallest class: no device of a group may be left without a part."""
        return self.most or min((factor.size or 1 for factor in self.classes), default=1)

    def shares_work(self, node: fx.Node) -> bool:
        """Tell whether a cut class stands in an operand or a result of the op, and may be cut there."""
        return self._shares(node, self.classes)

    def repeats_work(self, node: fx.Node) -> bool:
        """Tell whether an op is cut in `parts` alone."""
        return not self.shares_work(node) and self._shares(node, self.coarse)

    def _shares(self, node: fx.Node, classes: frozenset[FactorClass]) -> bool:
        if not classes or not self.factors.is_op(node):
            return False
        op = self.factors.op(node)
        present = op.made.union(*(operand.classes for operand in op.operands))
        return not classes.isdisjoint(present - op.whole)

    def splits(self, node: fx.Node) -> bool:
        """Tell whether a cut class stands in a dim of the value."""
        return any(not self.classes.isdisjoint(dim) for dim in self.factors.dims(node))

    def repeats(self, node: fx.Node) -> bool:
        """Tell whether the value is cut in `parts` alone, so that several devices hold each of them."""
        return not self.splits(node) and any(not self.coarse.isdisjoint(dim) for dim in self.factors.dims(node))

    def sums(self, node: fx.Node) -> bool:
        """Tell whether the value is summed over the group."""
        return node in self.summed

    def returns(self, node: fx.Node) -> bool:
        """Tell whether the value's cotangent is summed over the group."""
        return node in self.returned

    def shares_sequence(self, node: fx.Node) -> bool:
        """Tell whether the op can run on a part of a sequence."""
        return node in self.in_sequence

    def exchanged(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return what is cut anew where attention is shared by heads: what it compares, and what it makes."""
        op = self.factors.op(node) if self.factors.is_op(node) else None
        if op is None or not op.travelling or class_apart(op, self.factors) is None:
            return ()
        return (op.operands[0].node, *(op.operands[i].node for i in sorted(op.travelling)), node)

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
    annotated = Annotate(plan, wants_values=False)(analysed)
    outside = read_outside(annotated)
    axis = _deduced(annotated, annotated.classes, TENSOR, outside)
    shared = _shared(annotated, axis, outside)
    return WorkShares(analysed.factors, annotated.classes, *_added_up(axis), shared, asked=split)


def wide_work_shares(analysed: AnalysedGraph, split: Split = ()) -> WorkShares | None:
    """Return what a group of more devices shares than what it cuts first has parts; None where it cannot be so large.

    It is that of two typical devices for each part.
    """
    plan = replace(Plan.tensor_parallel((0, 1)), split=split)
    narrow = WorkShares(analysed.factors, Annotate(plan, wants_values=False)(analysed).classes)
    able = list(_widths(analysed, narrow))
    if not able:
        return None
    wide = replace(plan, pipelines=Plan.tensor_parallel(range(2 * narrow.units)).pipelines)
    annotated = Annotate(wide, wants_values=False)(analysed)
    outside = read_outside(annotated)
    coarse = _deduced(annotated, annotated.classes, TENSOR, outside)
    fine = _deduced(annotated, annotated.fine, FINE, outside)
    pairs = zip(_added_up(coarse), _added_up(fine), strict=True)
    summed, returned = (first | second for first, second in pairs)
    late = fine.summed_cotangents & annotated.flow.parameters
    rest = annotated.classes, narrow.units, able[-1], frozenset(late)
    return WorkShares(annotated.factors, annotated.fine, summed, returned, frozenset(), *rest, asked=split)


def larger_work_shares(analysed: AnalysedGraph, split: Split) -> WorkShares | None:
    """Return what a group shares that is too large for something that smaller ones cut besides `split`, as for heads.

    That is whole on every device then, unless its parts can be repeated (`wide_work_shares`). None where there is no
    such group: what is asked for has no more parts.
    """
    plan = replace(Plan.tensor_parallel((0, 1)), split=split)
    narrow = WorkShares(analysed.factors, Annotate(plan, wants_values=False)(analysed).classes)
    if narrow.units >= min((factor.size or 1 for factor in classes_to_split(plan, analysed.factors)), default=1):
        return None
    larger = replace(plan, pipelines=Plan.tensor_parallel(range(narrow.units + 1)).pipelines)
    annotated = Annotate(larger, wants_values=False)(analysed)
    outside = read_outside(annotated)
    axis = _deduced(annotated, annotated.classes, TENSOR, outside)
    shared = _shared(annotated, axis, outside)
    return WorkShares(annotated.factors, annotated.classes, *_added_up(axis), shared, asked=split)


def expert_splits(analysed: AnalysedGraph, taken: frozenset[FactorClass]) -> tuple[Split, ...]:
    """Return how a group is asked to split groups of rows with a matrix each, as experts are, if some are not `taken`.

    Names of parameters stand for those of all blocks.
    """
    factors = analysed.factors
    groups = {c for op in factors.ops if op.counted for c in op.sharded if c not in taken and factors.splittable(c)}
    found = {(_NUMBER.sub(".*", name), dim) for c in groups for name, dim in factors.occurrences(c)}
    return (tuple(sorted(found)),) if found else ()


_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def _widths(analysed: AnalysedGraph, narrow: WorkShares) -> Iterator[int]:
    """Yield the multiples of the parts of the smallest class that a group can have devices, without a gap."""
    sizes = (narrow.units * each for each in count(2))
    return takewhile(lambda size: finer_than(analysed, narrow.classes, size) is not None, sizes)


def _deduced(
    annotated: AnnotatedGraph, splits: frozenset[FactorClass], axis: int, outside: frozenset[fx.Node]
) -> AxisDeduction:
    graph, factors, flow = annotated.graph, annotated.factors, annotated.flow
    return deduce_tensor_axis(graph, factors, flow, splits, axis_prices(annotated, axis), outside=outside)


def _added_up(axis: AxisDeduction) -> tuple[frozenset[fx.Node], frozenset[fx.Node]]:
    """Return the values that are summed along an axis, and those whose cotangents are."""
    needs = [need for decision in axis.decisions.values() for need in decision.needs]
    later = {need.node for need in needs if _is_summed(axis, need.node) and not isinstance(need.state, Summed)}
    at_once = {node for node, made in axis.made.items() if isinstance(made, Summed) and not _is_summed(axis, node)}
    back = {need.node for need in needs if need.summed_cotangent} - axis.summed_cotangents
    return frozenset(later | at_once), frozenset(back)


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
    return axis.decisions[tuple_producer(node) if is_item(node) else node].factor is None
