"""Where sums are made, and in what parts: how the result of an op lies on an axis for those that read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from hetu_fx.deduction.factors import FactorClass, FactorMap, flat
from hetu_fx.graph import meta
from hetu_fx.transforms.flow import Flow
from hetu_fx.transforms.linear_chains import linear_readers, linear_source, shrinks_later
from hetu_fx.transforms.sequence import SequenceCut
from hetu_fx.transforms.states import SUMMED, WHOLE, AxisState, Decision, SplitOn


@dataclass(frozen=True, eq=False)
class Settling:
    """Settles results in the course of a forward walk, whose `states` so far it reads.

    Fields:
        factors: what the ops do to classes.
        splits: the classes that the axis splits wherever it can.
        cut: what may lie in parts of a sequence besides.
        states: how the values settled so far lie.
    """

    factors: FactorMap
    splits: frozenset[FactorClass]
    cut: SequenceCut
    states: Mapping[fx.Node, AxisState]

    def of_result(self, node: fx.Node, made: AxisState) -> AxisState:
        """Return how a result lies for its readers: a sum is made here, unless a linear op makes less of it first."""
        if made != SUMMED:
            return self._joined(node, made)
        part = self._wanted_part(node)
        if part is not None:
            return SplitOn(part)
        return SUMMED if shrinks_later(node, self.factors) or self._parts_later(node) else WHOLE

    def of_item(self, item: fx.Node, made: AxisState) -> AxisState:
        """Return how one of several results lies for its readers; sums are made at once."""
        return WHOLE if made == SUMMED else self._joined(item, made)

    def joins_parts(self, node: fx.Node, decisions: Mapping[fx.Node, Decision], flow: Flow) -> bool:
        """Tell whether a value is made, by linear ops that run whole, of one that lies in parts of a sequence.

        Summands of its cotangent go back to the parts as they are: summing and cutting is one step there.
        """
        decision = decisions.get(node) if self.cut.ops else None
        source = linear_source(node, self.factors, flow)
        if decision is None or decision.factor is not None or source is None:
            return False
        return self._is_sequence(self.states[source]) or self.joins_parts(source, decisions, flow)

    def _joined(self, node: fx.Node, state: AxisState) -> AxisState:
        """Return the state with the parts of a sequence put together where others than ops read the value."""
        return WHOLE if node in self.cut.joined and self._is_sequence(state) else state

    def _is_sequence(self, state: AxisState) -> bool:
        return isinstance(state, SplitOn) and state.factor not in self.splits

    def _wanted_part(self, node: fx.Node) -> FactorClass | None:
        """Return the sequence in parts of which a reader takes a sum, if one does."""
        if node in self.cut.joined or not meta.is_tensor(node):
            return None
        mine = frozenset(flat(self.factors.dims(node)))
        wanted = [c for user in node.users for c in self.cut.of(user) & mine if not self._splits_own(user)]
        return min(wanted, key=lambda c: c.id, default=None)

    def _splits_own(self, reader: fx.Node) -> bool:
        """Tell whether an op has an operand that is split on one of the model's own classes."""
        operands = (operand.node for operand in self.factors.op(reader).operands)
        states = (self.states.get(node) for node in operands)
        return any(isinstance(state, SplitOn) and state.factor in self.splits for state in states)

    def _parts_later(self, node: fx.Node) -> bool:
        """Tell whether linear ops, each the only reader of the one before, make a value that is wanted in parts."""
        for reader in linear_readers(node, self.factors) if self.cut.ops else ():
            if node in self.cut.joined:
                return False
            if self._wanted_part(reader) is not None:
                return True
            node = reader
        return False
