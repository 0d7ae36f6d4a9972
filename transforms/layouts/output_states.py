"""Where sums are made, and in what parts: how the result of an op may lie on an axis for those that read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass, FactorMap, OpFactors, flat
from hetu_fx.graph import meta
from hetu_fx.transforms.layouts.sequence_parallel import SequenceCut
from hetu_fx.transforms.layouts.states import SUMMED, WHOLE, AxisState, SplitOn

States = Mapping[fx.Node, AxisState]


@dataclass(frozen=True, eq=False)
class OutputStates:
    """Lists the states in which results may be left for their readers.

    Attributes:
        factors: what the ops do to classes.
        splits: the classes that the axis splits wherever it can.
        cut: what may lie in parts of a sequence besides.
        outside: values that others than the stage's ops read: nobody but its devices could add up summands of them.
    """

    factors: FactorMap
    splits: frozenset[FactorClass]
    cut: SequenceCut
    outside: frozenset[fx.Node] = frozenset()

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


def _may_take_summands(op: OpFactors, node: fx.Node, states: States) -> bool:
    """Tell whether the op is linear in the value, together with others that are summands or not known yet."""
    places = frozenset(i for i, operand in enumerate(op.operands) if operand.node is node)
    others = [group - places for group in op.linear if places <= group]
    return any(all(states.get(op.operands[i].node, SUMMED) == SUMMED for i in group) for group in others)
