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
from hetu_fx.transforms.layouts.program_choices import Choices, OpCut
from hetu_fx.transforms.layouts.states import SUMMED, WHOLE, AxisState, OpStrategy, SplitOn, Summed
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
            strategy = self._split_on(node, op.with_cut(choice.factor), choice.factor, states)
            return (replace(_in_segment(strategy, choice.segment), factors=choice.factors),)
        if not choice.on_summands:
            return (self._whole_strategy(op, states),)
        found = self._on_summands(node, op, states)
        if not found:
            raise PlanError(
                f"the program runs '{node.name}' ({meta.source_line(node)}) on summands, but none of its operands is a "
                f"sum that it is linear in\nhint: give 'whole', or what to cut it on"
            )
        return tuple(found)

    def _following(self, node: fx.Node, states: States) -> OpStrategy:
        op = self.factors.op(node)
        given = (states[operand.node] for operand in op.read)
        cut = (state for state in given if isinstance(state, SplitOn))
        able = [state for state in cut if state.factor in op.classes - op.whole - op.sharded]
        if able:
            return _in_segment(self._split_on(node, op, able[0].factor, states), able[0].segment)
        return next(iter(self._on_summands(node, op, states)), self._whole_strategy(op, states))

    def of_result(self, node: fx.Node, made: AxisState, states: States) -> tuple[AxisState, ...]:
        """Return how a result may lie for its readers."""
        wanted = self._wanted.get(node, ())
        if not meta.is_tensor(node):
            return (made,)
        if node in self.outside and (isinstance(made, Summed) or self._is_open(made)):
            return (WHOLE,)
        if isinstance(made, SplitOn):
            others = any((choice.factor, choice.segment) != (made.factor, made.segment) for choice in wanted)
            return (made, WHOLE) if others and len(wanted) > 1 else (made,)
        if not isinstance(made, Summed):
            return (made,)
        takes = [choice.on_summands for choice in wanted]
        if takes and all(takes):
            return (made,)
        mine = self._classes(node)
        parts = dict.fromkeys(SplitOn(c.factor, c.segment) for c in wanted if c.factor in mine and c.factor)
        return (WHOLE, *parts, *([made] if any(takes) else []))

    def of_item(self, item: fx.Node, made: AxisState) -> AxisState:
        """Return how one of several results lies for its readers; sums are made at once."""
        return WHOLE if made == SUMMED or (item in self.outside and self._is_open(made)) else made

    def _is_open(self, state: AxisState) -> bool:
        """Tell whether a value lies in parts whose sizes only the run tells."""
        return isinstance(state, SplitOn) and state.factor.size is None

    def of_leaf(self, leaf: Leaf) -> AxisState:
        """Return how a leaf lies: a parameter in parts that an op which reads it is cut on, else whole."""
        if leaf.kind is not LeafKind.PARAMETER:
            return WHOLE
        mine = self._classes(leaf.node)
        cut = (choice for choice in self._wanted.get(leaf.node, ()) if choice.factor in mine)
        return next((SplitOn(choice.factor, choice.segment) for choice in cut if choice.factor is not None), WHOLE)

    def _classes(self, node: fx.Node) -> frozenset[FactorClass]:
        return frozenset(flat(self.factors.dims(node)))

    @cached_property
    def _wanted(self) -> dict[fx.Node, tuple[OpCut, ...]]:
        """Return what the program says of the readers of each value, of what reads it through views too."""
        nodes: list[fx.Node] = list(next(iter(self.choices)).graph.nodes) if self.choices else []
        found: dict[fx.Node, tuple[OpCut, ...]] = {}
        for node in reversed(nodes):
            found[node] = tuple(choice for user in node.users for choice in self._of_reader(user, found))
        return found

    def _of_reader(self, user: fx.Node, found: dict[fx.Node, tuple[OpCut, ...]]) -> Iterator[OpCut]:
        if user in self.choices:
            yield self.choices[user]
        elif self.factors.is_op(user):
            yield from found[user]


def _in_segment(strategy: OpStrategy, segment: int) -> OpStrategy:
    """Return a strategy that computes a part by the ratios of a segment."""

    def placed(state: AxisState) -> AxisState:
        return SplitOn(strategy.factor, segment) if strategy.factor and state == SplitOn(strategy.factor) else state

    needs = tuple(replace(need, state=placed(need.state)) for need in strategy.needs)
    return replace(strategy, needs=needs, result=placed(strategy.result), segment=segment)
