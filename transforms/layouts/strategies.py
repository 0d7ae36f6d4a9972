"""The strategies by which an op can run on one axis, and how its result may lie for those that read it.

Both follow from its rule and the states of its operands; where sums are made, and in what parts, is part of the latter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass, FactorMap, OpFactors, flat
from hetu_fx.deduction.rules.forms import OnMissingFactor
from hetu_fx.errors import DeductionError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Leaf, LeafKind
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.reshard_cost import product_flops
from hetu_fx.transforms.layouts.sequence_parallel import SequenceCut
from hetu_fx.transforms.layouts.states import (
    SUMMED,
    WHOLE,
    AxisState,
    DisjointPartial,
    OperandNeed,
    OpStrategy,
    SplitOn,
    Summed,
    Whole,
)

Splits = frozenset[FactorClass]
States = Mapping[fx.Node, AxisState]


@dataclass(frozen=True, eq=False)
class Strategies:
    """Lists strategies for ops, and the states in which results may be left for their readers.

    Attributes:
        factors: what the ops do to classes.
        flow: what the values depend on.
        splits: the classes that the axis splits wherever it can.
        cut: what may lie in parts of a sequence besides.
        may_gather: whether split values may be put together; without, an op that needs that is an error.
        outside: values that others than the stage's ops read: nobody but its devices could add up summands of them.
    """

    factors: FactorMap
    flow: Flow
    splits: Splits
    cut: SequenceCut
    may_gather: bool
    outside: frozenset[fx.Node] = frozenset()

    def of(self, node: fx.Node, states: States) -> tuple[OpStrategy, ...]:
        """Return how an op can run, one strategy at least; first the one that spreads most work and keeps most apart.

        Raises:
            DeductionError: naming the op, the user's line and the way out.
        """
        op = self.factors.op(node)
        parted = [self._split_on(node, op, factor, states) for factor in self._candidates(node, op, states)]
        keeps_weights = self.may_gather and self._spreads_a_product(node, op, states)
        summands = [] if keeps_weights else self._on_summands(node, op, states)
        found = [*parted, *summands, *([] if parted else self._in_sequence(node, op, states))]
        if not found:
            self._check_gather(node, op, states)
        if not found or found == summands or self._may_run_whole(node, op, found[0], states):
            found.append(self._whole_strategy(op, states))
        return tuple(found)

    def of_leaf(self, leaf: Leaf) -> AxisState:
        """Return how a leaf lies; of the batch, a device of a group is given all columns of its rows."""
        mine = [c for c in flat(self.factors.dims(leaf.node)) if c in self.splits]
        given = [c for c in mine if c.is_batch] if leaf.kind is LeafKind.INPUT else mine
        return SplitOn(given[0]) if given else WHOLE

    def _candidates(self, node: fx.Node, op: OpFactors, states: States) -> list[FactorClass]:
        """Return the split factors to compute a part of: first the one that most operands are already split on."""
        found = [c for c in (op.classes & self.splits) - self._uncut(op) if _is_worth(op, c, states)]
        return sorted(found, key=lambda c: (-_already_split(op, c, states), c.id))

    def _uncut(self, op: OpFactors) -> Splits:
        """Return the classes that cannot be cut in this op; a form of it communicates like a gather."""
        return op.whole if self.may_gather else op.whole | op.sharded

    def _on_summands(self, node: fx.Node, op: OpFactors, states: States) -> list[OpStrategy]:
        """Return how the op runs on operands that are summands, one by one; nothing if it needs their sum.

        Where sums may be made at once, summands are not cast to a narrower type, which would round each of them.
        """
        summed = frozenset(i for i, o in enumerate(op.operands) if isinstance(states[o.node], Summed))
        result = _of_summands(op, summed, states)
        if result is None or (self.may_gather and _narrows(node, op, summed)):
            return []
        given = [states[o.node] if i in summed else WHOLE for i, o in enumerate(op.operands)]
        return [OpStrategy(None, tuple(_need(op, i, state, states) for i, state in enumerate(given)), result)]

    def _in_sequence(self, node: fx.Node, op: OpFactors, states: States) -> list[OpStrategy]:
        if node in self.cut.exchanged:
            return [self._split_on(node, op, self.cut.exchanged[node], states)]
        part = max(self.cut.of(node), key=lambda c: (_already_split(op, c, states), -c.id), default=None)
        if part is None:
            return []
        strategy = self._split_on(node, op.with_cut(part), part, states)
        return [_in_ring(op, strategy) if node in self.cut.rings else strategy]

    def _whole_strategy(self, op: OpFactors, states: States) -> OpStrategy:
        return OpStrategy(None, tuple(_need(op, i, WHOLE, states) for i in range(len(op.operands))), WHOLE)

    def _may_run_whole(self, node: fx.Node, op: OpFactors, strategy: OpStrategy, states: States) -> bool:
        """Tell whether to gather may be better than to run in parts: operands disagree, or the op makes more of them.

        Weights are not gathered for a product, which would undo what the plan splits; what the plan asks to have in
        parts of a sequence, to hold less of it, stays so unless the op makes more of it.
        """
        if not self.may_gather or self.cut.is_asked or strategy.factor is None:
            return False
        if self._spreads_a_product(node, op, states):
            return False
        disagree = any(states[need.node] != need.state for need in strategy.needs)
        return (disagree and strategy.factor in self.splits) or self._enlarges(node, op, strategy.factor)

    def _spreads_a_product(self, node: fx.Node, op: OpFactors, states: States) -> bool:
        weights = [o.node for o in op.operands if not self.flow.through_inputs(o.node)]
        is_split = any(isinstance(states[weight], SplitOn) for weight in weights)
        return is_split and (not meta.is_tensor(node) or product_flops(node, op) > 0)

    def _enlarges(self, node: fx.Node, op: OpFactors, factor: FactorClass) -> bool:
        read = [o.node for o in op.read if factor in o.classes]
        return bool(read) and meta.is_tensor(node) and meta.numel(node) > sum(map(meta.numel, read))

    def _split_on(self, node: fx.Node, op: OpFactors, factor: FactorClass, states: States) -> OpStrategy:
        needs = tuple(_split_need(op, i, factor, states) for i in range(len(op.operands)))
        if factor in op.reduced:
            _check_averaged(node, op, factor)
            return OpStrategy(factor, needs, _lacking(op, factor))
        return OpStrategy(factor, needs, SplitOn(factor))

    def _check_gather(self, node: fx.Node, op: OpFactors, states: States) -> None:
        if self.may_gather:
            return
        for position, operand in enumerate(op.operands):
            if position not in op.unread and isinstance(states[operand.node], SplitOn):
                raise DeductionError(
                    f"{node.target} needs all rows of the batch ('{node.name}', {meta.source_line(node)}), so the "
                    f"batch cannot be split over pipelines or micro-batches\nhint: use a plan with one pipeline and "
                    f"one micro-batch, or register a rule with hetu_fx.register_rule if the op works row by row"
                )

    def of_result(self, node: fx.Node, made: AxisState, states: States) -> tuple[AxisState, ...]:
        """Return how a result may lie for its readers, who read values in `states`.

        A sum may be made at once, in parts that readers take, or left to those who can take summands; what is split
        may be put together at once if some reader needs it so.
        """
        if made != SUMMED:
            first = self._joined(node, made)
            gathered = isinstance(first, SplitOn) and self._is_wanted_whole(node, first.factor)
            return (first, WHOLE) if gathered else (first,)
        part = self._wanted_part(node, states)
        at_once: list[AxisState] = [WHOLE] if part is None else [SplitOn(part)]
        apart: list[AxisState] = [SplitOn(c) for c in self._own_parts(node)]
        later: list[AxisState] = [SUMMED] if self._is_wanted_in_summands(node, states) else []
        return (*at_once, *apart, *later)

    def of_item(self, item: fx.Node, made: AxisState) -> AxisState:
        """Return how one of several results lies for its readers; sums are made at once."""
        return WHOLE if made == SUMMED else self._joined(item, made)

    def _joined(self, node: fx.Node, state: AxisState) -> AxisState:
        """Return the state with the parts of a sequence put together where others than ops read the value."""
        return WHOLE if node in self.cut.joined and self._is_sequence(state) else state

    def _is_sequence(self, state: AxisState) -> bool:
        return isinstance(state, SplitOn) and state.factor not in self.splits

    def _readers(self, node: fx.Node) -> list[OpFactors]:
        return [self.factors.op(user) for user in node.users if self.factors.is_op(user)]

    def _is_wanted_whole(self, node: fx.Node, factor: FactorClass) -> bool:
        """Tell whether of several readers one at least needs a class whole."""
        readers = self._readers(node) if meta.is_tensor(node) else []
        return len(readers) > 1 and any(factor in op.whole for op in readers)

    def _own_parts(self, node: fx.Node) -> list[FactorClass]:
        """Return the classes that the axis splits in which some reader could take parts of a sum."""
        mine = self.splits.intersection(flat(self.factors.dims(node))) if meta.is_tensor(node) else ()
        wanted = (c for c in mine if any(c in op.classes - op.whole for op in self._readers(node)))
        return sorted(wanted, key=lambda c: c.id)

    def _wanted_part(self, node: fx.Node, states: States) -> FactorClass | None:
        """Return the sequence in parts of which a reader takes a sum, if one does."""
        if node in self.cut.joined or not meta.is_tensor(node):
            return None
        mine = frozenset(flat(self.factors.dims(node)))
        wanted = [c for user in node.users for c in self.cut.of(user) & mine if not self._splits_own(user, states)]
        return min(wanted, key=lambda c: c.id, default=None)

    def _splits_own(self, reader: fx.Node, states: States) -> bool:
        """Tell whether an op has an operand that is split on one of the model's own classes."""
        given = (states.get(operand.node) for operand in self.factors.op(reader).operands)
        return any(isinstance(state, SplitOn) and state.factor in self.splits for state in given)

    def _is_wanted_in_summands(self, node: fx.Node, states: States) -> bool:
        """Tell whether some reader may be able to run on summands of the value."""
        if node in self.outside or not meta.is_tensor(node) or not all(map(self.factors.is_op, node.users)):
            return False
        return any(_may_take_summands(op, node, states) for op in self._readers(node))


def gives_summands(
    node: fx.Node, decision: OpStrategy, need: OperandNeed, flow: Flow, *, of_summands: bool = False
) -> bool:
    """Tell whether an op gives back summands of an operand's cotangent.

    `of_summands`: the cotangent of the result comes as summands itself.
    """
    if decision.factors and not flow.through_inputs(need.node):
        return False
    wanted = decision.factor is not None or isinstance(decision.result, Summed) or of_summands
    trained = node in flow.differentiable and need.node in flow.differentiable
    return wanted and trained and isinstance(need.state, Whole)


def propagates_partial(node: fx.Node, decision: OpStrategy | None, flow: Flow) -> bool:
    """Tell whether summands of the result's cotangent become summands of the operands'.

    Not where an operand is split or itself a sum: each part of it, each summand, has the whole cotangent.
    """
    if decision is None:
        return True
    read = [need.state for need in decision.needs if need.node in flow.differentiable]
    return all(isinstance(state, Whole) for state in (decision.result, *read))


def passes_on_exactly(node: fx.Node, decision: OpStrategy | None, flow: Flow) -> bool:
    """Tell whether summands pass on, and none of the cotangents is of a narrower type: each would be rounded."""
    read = [need.node for need in decision.needs if need.node in flow.differentiable] if decision else []
    narrow = meta.is_tensor(node) and any(meta.dtype(node).itemsize > _itemsize(operand) for operand in read)
    return not narrow and propagates_partial(node, decision, flow)


def _lacking(op: OpFactors, factor: FactorClass) -> AxisState:
    """Return the state of a result that lacks `factor`, which is cut."""
    form = op.traits.sharded if factor in op.sharded else None
    match form.lacking if form is not None else OnMissingFactor.SUM:
        case OnMissingFactor.WHOLE:
            return WHOLE
        case OnMissingFactor.SUM:
            return SUMMED
        case OnMissingFactor.SPREAD:
            return DisjointPartial(factor)


def _narrows(node: fx.Node, op: OpFactors, summed: frozenset[int]) -> bool:
    return meta.is_tensor(node) and any(meta.dtype(node).itemsize < _itemsize(op.operands[i].node) for i in summed)


def _itemsize(node: fx.Node) -> int:
    return meta.dtype(node).itemsize if meta.is_tensor(node) else 0


def _of_summands(op: OpFactors, summed: frozenset[int], states: States) -> AxisState | None:
    kinds = {states[op.operands[i].node] for i in summed}
    if len(kinds) == 1 and summed <= op.traits.vanishing and isinstance(kind := next(iter(kinds)), DisjointPartial):
        return kind
    return SUMMED if summed and any(summed == group for group in op.linear) else None


def _need(op: OpFactors, position: int, state: AxisState, states: States) -> OperandNeed:
    """Return the need of an operand; one of which only dtype and device are read may stay as it is."""
    node = op.operands[position].node
    return OperandNeed(node, states[node] if position in op.unread else state)


def _already_split(op: OpFactors, factor: FactorClass, states: States) -> int:
    return sum(states[o.node] == SplitOn(factor) for o in op.operands)


def _is_worth(op: OpFactors, factor: FactorClass, states: States) -> bool:
    """Tell whether some operand is split on `factor`, or none has it (the op makes it, and can make a part)."""
    having = [o for o in op.read if factor in o.classes]
    return not having or any(states[o.node] == SplitOn(factor) for o in having)


def _split_need(op: OpFactors, position: int, factor: FactorClass, states: States) -> OperandNeed:
    operand = op.operands[position]
    if position in op.unread:
        return _need(op, position, WHOLE, states)
    if factor in operand.classes and not (factor in op.sharded and position in op.counted):
        return OperandNeed(operand.node, SplitOn(factor))
    if factor in op.sharded and states[operand.node] == DisjointPartial(factor):
        return OperandNeed(operand.node, DisjointPartial(factor))
    if position in op.counted:  # counts of rows: each shard has its own where rows are cut, all of them elsewhere
        return OperandNeed(operand.node, SUMMED if factor.is_batch else WHOLE)
    return OperandNeed(operand.node, WHOLE, True, first_only=factor in op.reduced and position in op.additive)


def _in_ring(op: OpFactors, strategy: OpStrategy) -> OpStrategy:
    """Return the strategy with the operands that may travel needed in parts."""
    travelling = {position: SplitOn(factor) for position, factor in op.travelling.items()}
    needs = (
        OperandNeed(need.node, travelling[i]) if i in travelling else need for i, need in enumerate(strategy.needs)
    )
    return replace(strategy, needs=tuple(needs), travels=True)


def _check_averaged(node: fx.Node, op: OpFactors, factor: FactorClass) -> None:
    """Refuse a mean over rows that the global-mean pass could not take apart: shares of rows would weigh alike."""
    if factor in op.averaged and factor.is_batch:
        raise DeductionError(
            f"{node.target} takes a mean over the rows of the batch ('{node.name}', {meta.source_line(node)}) in a "
            f"form that cannot be made a sum over a count\nhint: use a plan with one pipeline and one micro-batch"
        )


def _may_take_summands(op: OpFactors, node: fx.Node, states: States) -> bool:
    """Tell whether the op is linear in the value, together with others that are summands or not known yet."""
    places = frozenset(i for i, operand in enumerate(op.operands) if operand.node is node)
    others = [group - places for group in op.linear if places <= group]
    return any(all(states.get(op.operands[i].node, SUMMED) == SUMMED for i in group) for group in others)
