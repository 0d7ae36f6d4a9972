"""Deduce how every value lies on one axis, forward and cotangent, from the split factor classes alone.

The forward walk decides for every op which split factor it computes a part of, from the op's rule and the states of
its operands. The backward walk then says on which edges an op hands back only a summand of the cotangent: an operand
that lacks the factor its op is split on gets the sum over all parts. A cotangent is linear, so such summands may
flow further back through ops on parameters alone; at an activation they are summed, once for all its consumers.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from hetu_fx.deduction.factors import FactorClass, FactorMap, OpFactors, flat
from hetu_fx.errors import DeductionError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, OutputKind
from hetu_fx.transforms.flow import Flow
from hetu_fx.transforms.linear_chains import repeats_entries
from hetu_fx.transforms.sequence import UNCUT, SequenceCut
from hetu_fx.transforms.settle import Settling
from hetu_fx.transforms.sharded_forms import form_of, has_form
from hetu_fx.transforms.states import SUMMED, WHOLE, AxisState, Decision, Need, SplitOn, Spread, Summed, Whole

Splits = frozenset[FactorClass]


@dataclass(frozen=True)
class AxisDeduction:
    """States of all values on one axis.

    Attributes:
        splits: the factor classes that the axis splits.
        decisions: how each op runs.
        made: how each value comes out of its op.
        states: how it lies once its consumers read it (sums already made where `keep_sums` was not asked).
        summed_cotangents: values whose consumers all give back summands, which nothing sums within the graph.
    """

    splits: Splits
    decisions: Mapping[fx.Node, Decision]
    made: Mapping[fx.Node, AxisState]
    states: Mapping[fx.Node, AxisState]
    summed_cotangents: frozenset[fx.Node]

    def needs(self, node: fx.Node) -> tuple[Need, ...]:
        """Return what `node` needs of its tensor operands; nothing for leaves and items of a tuple."""
        decision = self.decisions.get(node)
        return decision.needs if decision else ()

    @property
    def talks(self) -> bool:
        """Tell whether some op needs a value, or gives back a cotangent, in another state than it is in."""
        return next(self.talking(), None) is not None

    def talking(self) -> Iterator[fx.Node]:
        """Yield the ops for which communication along the axis is needed."""
        return (node for node, decision in self.decisions.items() if any(map(self._differs, decision.needs)))

    def _differs(self, need: Need) -> bool:
        summed = need.summed_cotangent and need.node not in self.summed_cotangents
        return summed or self.states[need.node] != need.state


def deduce_axis(
    graph: Graph,
    factors: FactorMap,
    flow: Flow,
    splits: Splits,
    *,
    keep_sums: bool,
    may_gather: bool,
    cut: SequenceCut = UNCUT,
) -> AxisDeduction:
    """Deduce one axis on which `splits` are split.

    With `keep_sums`, sums stay unsummed as long as the ops are linear in them (the batch axis: a loss is summed over
    replicas and micro-batches at the very end). Without `may_gather`, an op that needs a split factor whole is an
    error: the rows of other pipelines and micro-batches cannot be brought in. What splits none of `splits` runs on a
    part of a sequence where `cut` allows it.

    Raises:
        DeductionError: naming the op, the user's line and the way out.
    """
    forward = _Forward(graph, factors, splits, keep_sums, may_gather, cut)
    for node in graph.graph.nodes:
        forward.visit(node)

    def may_stay(node: fx.Node) -> bool:
        own = keep_sums or not flow.through_inputs(node) or repeats_entries(node, factors, flow)
        return own or forward.settling.joins_parts(node, forward.decisions, flow)

    backward = _Backward(flow, forward, may_stay)
    if keep_sums and splits:
        backward.start(node for _, node in graph.outputs_of(OutputKind.VALUE))
    for node in reversed(graph.graph.nodes):
        backward.visit(node)
    return AxisDeduction(splits, backward.marked, forward.made, forward.states, frozenset(backward.summed))


class _Forward:
    """The forward walk: one decision per op, one state per value."""

    def __init__(
        self, graph: Graph, factors: FactorMap, splits: Splits, keep_sums: bool, may_gather: bool, cut: SequenceCut
    ) -> None:
        self.factors, self.splits = factors, splits
        self.keep_sums, self.may_gather = keep_sums, may_gather
        self.leaves = {leaf.node for leaf in graph.leaves}
        self.decisions: dict[fx.Node, Decision] = {}
        self.made: dict[fx.Node, AxisState] = {}
        self.states: dict[fx.Node, AxisState] = {}
        self.settling = Settling(factors, splits, cut, self.states)

    def visit(self, node: fx.Node) -> None:
        if node in self.leaves:
            self.states[node] = self._own_factor_state(node, WHOLE)
        elif is_item(node):
            self.made[node] = made = self._item_state(node)
            self.states[node] = made if self.keep_sums else self.settling.of_item(node, made)
        elif node.op == "call_function" and self.factors.is_op(node):
            decision = self._decide(node, self.factors.op(node))
            self.decisions[node] = decision
            self.made[node] = made = decision.result
            self.states[node] = made if self.keep_sums else self.settling.of_result(node, made)

    def _own_factor_state(self, node: fx.Node, otherwise: AxisState) -> AxisState:
        mine = [c for c in flat(self.factors.dims(node)) if c in self.splits]
        return SplitOn(mine[0]) if mine else otherwise

    def _item_state(self, node: fx.Node) -> AxisState:
        decision = self.decisions[whole_of(node)]
        if decision.factor is None:
            return decision.result
        return SplitOn(decision.factor) if decision.factor in flat(self.factors.dims(node)) else SUMMED

    def _decide(self, node: fx.Node, op: OpFactors) -> Decision:
        factor = self._pick(node, op)
        if factor is not None:
            return self._split_on(node, op, factor)
        summed = frozenset(i for i, o in enumerate(op.operands) if isinstance(self.states[o.node], Summed))
        result = self._of_summands(op, summed)
        if result is not None:
            states = [self.states[o.node] if i in summed else WHOLE for i, o in enumerate(op.operands)]
            return Decision(None, tuple(self._need(op, i, state) for i, state in enumerate(states)), result)
        part = max(self.settling.cut.of(node), key=lambda c: (self._already_split(op, c), -c.id), default=None)
        if part is not None:
            return self._split_on(node, op.cut_at(part), part)
        self._check_gather(node, op)
        return Decision(None, tuple(self._need(op, i, WHOLE) for i in range(len(op.operands))), WHOLE)

    def _of_summands(self, op: OpFactors, summed: frozenset[int]) -> AxisState | None:
        """Return what the op makes of operands that are summands, one by one; None if it needs their sum."""
        kinds = {self.states[op.operands[i].node] for i in summed}
        if len(kinds) == 1 and summed <= op.vanishing and isinstance(kind := next(iter(kinds)), Spread):
            return kind
        return SUMMED if summed and any(summed == group for group in op.linear) else None

    def _need(self, op: OpFactors, position: int, state: AxisState) -> Need:
        """Return the need of an operand; one of which only dtype and device are read may stay as it is."""
        node = op.operands[position].node
        return Need(node, self.states[node] if position in op.unread else state)

    def _pick(self, node: fx.Node, op: OpFactors) -> FactorClass | None:
        """Return the split factor to compute a part of: the one most operands are already split on."""
        candidates = [c for c in (op.classes & self.splits) - self._whole(node, op) if self._worth(op, c)]
        return max(candidates, key=lambda c: (self._already_split(op, c), -c.id), default=None)

    def _whole(self, node: fx.Node, op: OpFactors) -> Splits:
        """Return the classes that cannot be cut in this op; its form, if it has one, communicates like a gather."""
        return op.whole if self.may_gather and has_form(node) else op.whole | op.sharded

    def _already_split(self, op: OpFactors, factor: FactorClass) -> int:
        return sum(self.states[o.node] == SplitOn(factor) for o in op.operands)

    def _worth(self, op: OpFactors, factor: FactorClass) -> bool:
        """Tell whether some operand is split on `factor`, or none has it (the op makes it, and can make a part)."""
        read = (o for i, o in enumerate(op.operands) if i not in op.unread)
        having = [o for o in read if factor in o.classes]
        return not having or any(self.states[o.node] == SplitOn(factor) for o in having)

    def _split_on(self, node: fx.Node, op: OpFactors, factor: FactorClass) -> Decision:
        needs = tuple(self._split_need(op, i, factor) for i in range(len(op.operands)))
        if factor in op.reduced:
            self._check_averaged(node, op, factor)
            return Decision(factor, needs, form_of(node).result(factor) if factor in op.sharded else SUMMED)
        return Decision(factor, needs, SplitOn(factor))

    def _split_need(self, op: OpFactors, position: int, factor: FactorClass) -> Need:
        operand = op.operands[position]
        if position in op.unread:
            return self._need(op, position, WHOLE)
        if factor in operand.classes and not (factor in op.sharded and position in op.counted):
            return Need(operand.node, SplitOn(factor))
        if factor in op.sharded and self.states[operand.node] == Spread(factor):
            return Need(operand.node, Spread(factor))
        if position in op.counted:  # counts of rows: each shard has its own where rows are cut, all of them elsewhere
            return Need(operand.node, SUMMED if factor.is_batch else WHOLE)
        return Need(operand.node, WHOLE, True, first_only=factor in op.reduced and position in op.additive)

    def _check_averaged(self, node: fx.Node, op: OpFactors, factor: FactorClass) -> None:
        """Refuse a mean over rows that the global-mean pass could not take apart: shares of rows would weigh alike."""
        if factor in op.averaged and factor.is_batch:
            raise DeductionError(
                f"{node.target} takes a mean over the rows of the batch ('{node.name}', {meta.source_line(node)}) in a "
                f"form that cannot be made a sum over a count; use a plan with one pipeline and one micro-batch"
            )

    def _check_gather(self, node: fx.Node, op: OpFactors) -> None:
        if self.may_gather:
            return
        for position, operand in enumerate(op.operands):
            if position not in op.unread and isinstance(self.states[operand.node], SplitOn):
                raise DeductionError(
                    f"{node.target} needs all rows of the batch at once ('{node.name}', {meta.source_line(node)}), so "
                    f"the batch cannot be split over pipelines or micro-batches; use a plan with one pipeline and one "
                    f"micro-batch, or register a rule with hetu_fx.register_rule if the op works row by row"
                )


def is_item(node: fx.Node) -> bool:
    """Tell whether the node takes one tensor out of an op with several results."""
    return node.op == "call_function" and node.target is operator.getitem and meta.is_tensor(node)


def whole_of(item: fx.Node) -> fx.Node:
    """Return the op that an item is one result of."""
    whole = item.args[0]
    assert isinstance(whole, fx.Node)
    return whole


class _Backward:
    """The backward walk: marks the edges that give back summands, from the last op to the first.

    `may_stay` tells of which values the cotangent may stay unsummed, if all consumers give back summands.
    """

    def __init__(self, flow: Flow, walk: _Forward, may_stay: Callable[[fx.Node], bool]) -> None:
        self.flow, self.may_stay = flow, may_stay
        self.decisions, self.states = walk.decisions, walk.states
        self.marked: dict[fx.Node, Decision] = {}
        self.flags: dict[fx.Node, list[bool]] = defaultdict(list)
        self.summed: set[fx.Node] = set()

    def start(self, outputs: Iterable[fx.Node]) -> None:
        """Take note of outputs: the gradient of one that is whole in all replicas comes to one of them only."""
        for node in outputs:
            if isinstance(self.states.get(node), Whole):
                self.flags[node].append(True)

    def visit(self, node: fx.Node) -> None:
        if is_item(node):
            return  # decided with its op, for all results alike
        results = [node, *(user for user in node.users if is_item(user))]
        flags = [flag for result in results for flag in self.flags[result]]
        if flags and all(flags) and self.may_stay(node) and self._passes_on(node):
            self.summed.update(results)
        if node in self.decisions:
            self.marked[node] = self._marked(node, self.decisions[node])
            for need in self.marked[node].needs if node in self.flow.differentiable else ():
                self.flags[need.node].append(need.summed_cotangent)

    def _passes_on(self, node: fx.Node) -> bool:
        """Tell whether summands of the result's cotangent become summands of the operands'.

        Not where an operand is split or itself a sum: each part of it, each summand, has the whole cotangent.
        """
        decision = self.decisions.get(node)
        if decision is None:
            return True
        read = [need.state for need in decision.needs if need.node in self.flow.differentiable]
        return all(isinstance(state, Whole) for state in (decision.result, *read))

    def _marked(self, node: fx.Node, decision: Decision) -> Decision:
        wanted = decision.factor is not None or isinstance(decision.result, Summed) or node in self.summed
        flows = wanted and node in self.flow.differentiable

        def mark(need: Need) -> Need:
            summed = flows and isinstance(need.state, Whole) and need.node in self.flow.differentiable
            return replace(need, summed_cotangent=summed)

        return replace(decision, needs=tuple(map(mark, decision.needs)))
