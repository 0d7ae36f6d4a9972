"""Strategies of ops whose stage has a program: each op has one, the program's; how values lie is left to prices.

A sum may be made whole, in parts that some reader is cut on, or be left to readers that take summands. What is split
may be put together once where several readers want it otherwise. Views lie as what they are of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass, flat
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Leaf, LeafKind
from hetu_fx.transforms.layouts.program_choices import Choices, OpChoice
from hetu_fx.transforms.layouts.states import WHOLE, AxisState, OpStrategy, SplitOn, Summed
from hetu_fx.transforms.layouts.strategies import States, Strategies


@dataclass(frozen=True, eq=False)
class ProgramStrategies(Strategies):
    """Lists the one strategy of each op, and the states in which results may be left for their readers."""

    choices: Choices = field(default_factory=dict)

    def of(self, node: fx.Node, states: States) -> tuple[OpStrategy, ...]:
        """Return how the program says that an op runs, or how a view follows what it is of.

        Raises:
            PlanError: the op is to run on summands, but cannot.
        """
        choice, op = self.choices.get(node), self.factors.op(node)
        if choice is None:
            return (self._following(node, states),)
        if choice.factor is not None:
            strategy = self._split_on(node, op.cut_at(choice.factor), choice.factor, states)
            return (replace(strategy, factors=choice.factors),)
        if not choice.on_summands:
            return (self._whole_strategy(op, states),)
        found = self._on_summands(node, op, states)
        if not found:
            raise PlanError(
                f"the program runs '{node.name}' ({meta.source_line(node)}) on summands, but none of its operands is a "
                f"sum that it is linear in; give 'whole', or what to cut it on"
            )
        return tuple(found)

    def _following(self, node: fx.Node, states: States) -> OpStrategy:
        op = self.factors.op(node)
        given = (states[operand.node] for operand in op.read)
        factors = (state.factor for state in given if isinstance(state, SplitOn))
        able = [factor for factor in factors if factor in op.classes - op.whole - op.sharded]
        if able:
            return self._split_on(node, op, able[0], states)
        return next(iter(self._on_summands(node, op, states)), self._whole_strategy(op, states))

    def of_result(self, node: fx.Node, made: AxisState, states: States) -> tuple[AxisState, ...]:
        """Return how a result may lie for its readers."""
        wanted = self._wanted.get(node, ())
        if not meta.is_tensor(node):
            return (made,)
        if isinstance(made, SplitOn):
            others = any(choice.factor != made.factor for choice in wanted)
            return (made, WHOLE) if others and len(wanted) > 1 else (made,)
        if not isinstance(made, Summed):
            return (made,)
        takes = [choice.on_summands and node not in self.outside for choice in wanted]
        if takes and all(takes):
            return (made,)
        parts = dict.fromkeys(SplitOn(c.factor) for c in wanted if c.factor in self._classes(node) and c.factor)
        return (WHOLE, *parts, *([made] if any(takes) else []))

    def of_leaf(self, leaf: Leaf) -> AxisState:
        """Return how a leaf lies: a parameter in parts that an op which reads it is cut on, else whole."""
        if leaf.kind is not LeafKind.PARAMETER:
            return WHOLE
        mine = self._classes(leaf.node)
        cut = (choice.factor for choice in self._wanted.get(leaf.node, ()) if choice.factor in mine)
        return next((SplitOn(factor) for factor in cut if factor is not None), WHOLE)

    def _classes(self, node: fx.Node) -> frozenset[FactorClass]:
        return frozenset(flat(self.factors.dims(node)))

    @cached_property
    def _wanted(self) -> dict[fx.Node, tuple[OpChoice, ...]]:
        """Return what the program says of the readers of each value, of what reads it through views too."""
        nodes: list[fx.Node] = list(next(iter(self.choices)).graph.nodes) if self.choices else []
        found: dict[fx.Node, tuple[OpChoice, ...]] = {}
        for node in reversed(nodes):
            found[node] = tuple(choice for user in node.users for choice in self._of_reader(user, found))
        return found

    def _of_reader(self, user: fx.Node, found: dict[fx.Node, tuple[OpChoice, ...]]) -> Iterator[OpChoice]:
        if user in self.choices:
            yield self.choices[user]
        elif self.factors.is_op(user):
            yield from found[user]
