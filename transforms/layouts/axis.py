"""Deduce how every value lies on one axis, forward and cotangent, from the split factor classes alone.

The forward walk decides for every op which split factor it computes a part of, from the op's rule and the states of
its operands. The backward walk then says on which edges an op hands back only a summand of the cotangent: an operand
that lacks the factor its op is split on gets the sum over all parts. Where operands disagree, or there are several
places for a sum, prices decide.

A cotangent is linear, so if all readers of a value give back summands, these may flow back further, through any op
that runs whole on whole operands, to be added up there, once for all readers: a smaller value, one at which several
ways back meet, or one that lies in parts, where adding up and cutting is one step. On the way, gradients of parameters
become summands too, which are added up when gradients are synchronised.

Strategies of ops whose stage has a program: each op has one, the program's; how values lie is left to prices. A sum may
be made whole, in parts that some reader is cut on, or be left to readers that take summands. What is split may be put
together once where several readers want it otherwise. Views lie as what they are of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass, FactorMap, flat
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, Leaf, LeafKind, OutputKind
from hetu_fx.transforms.layouts.flow import Flow, is_item
from hetu_fx.transforms.layouts.forward_search import Branch, ForwardWalk, Walk, beam
from hetu_fx.transforms.layouts.program_choices import Choices, OpCut
from hetu_fx.transforms.layouts.reshard_cost import Prices
from hetu_fx.transforms.layouts.sequence_parallel import UNCUT, SequenceCut
from hetu_fx.transforms.layouts.states import SUMMED, WHOLE, AxisState, OperandNeed, OpStrategy, SplitOn, Summed, Whole
from hetu_fx.transforms.layouts.strategies import (
    States,
    Strategies,
    gives_summands,
    passes_on_exactly,
    propagates_partial,
)


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


Splits = frozenset[FactorClass]

_DIGITS = 12  # of seconds: less is rounding


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
    decisions: Mapping[fx.Node, OpStrategy]
    made: Mapping[fx.Node, AxisState]
    states: Mapping[fx.Node, AxisState]
    summed_cotangents: frozenset[fx.Node]

    def needs(self, node: fx.Node) -> tuple[OperandNeed, ...]:
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

    @property
    def exchanged(self) -> tuple[fx.Node, ...]:
        """Return the values that are exchanged along the axis, then those whose cotangents are."""
        needs = [need for decision in self.decisions.values() for need in decision.needs]
        values = dict.fromkeys(need.node for need in needs if self.states[need.node] != need.state)
        return (*values, *dict.fromkeys(need.node for need in needs if self.sums_cotangent(need)))

    def _differs(self, need: OperandNeed) -> bool:
        return self.sums_cotangent(need) or self.states[need.node] != need.state

    def sums_cotangent(self, need: OperandNeed) -> bool:
        """Tell whether an op gives back summands of a value's cotangent that are added up within the graph."""
        return need.summed_cotangent and need.node not in self.summed_cotangents


def deduce_batch_axis(graph: Graph, factors: FactorMap, flow: Flow, rows: Splits) -> AxisDeduction:
    """Deduce the axis on which the rows of the batch are spread over pipelines and micro-batches.

    Sums stay unsummed as long as the ops are linear in them: a loss is summed over replicas and micro-batches at the
    very end. An op that needs a split factor whole is an error: the rows of other pipelines and micro-batches cannot
    be brought in. So nothing is left to choose.

    Raises:
        DeductionError: naming the op, the user's line and the way out.
    """
    strategies = Strategies(factors, flow, rows, UNCUT, may_gather=False)
    walk = ForwardWalk(graph, strategies).walk()
    marks = _CotangentMarks(flow, walk, lambda node: True)
    if rows:
        marks.start(node for _, node in graph.outputs_of(OutputKind.VALUE))
    return marks.deduction(graph, rows)


def deduce_tensor_axis(
    graph: Graph,
    factors: FactorMap,
    flow: Flow,
    splits: Splits,
    prices: Prices,
    *,
    cut: SequenceCut = UNCUT,
    outside: frozenset[fx.Node] = frozenset(),
    exchanged: frozenset[fx.Node] = frozenset(),
    choices: Choices | None = None,
) -> AxisDeduction:
    """Deduce the axis of a tensor-parallel group, on which `splits` are split, at the least price found.

    What splits none of `splits` runs on a part of a sequence where `cut` allows it. `outside` are values that others
    than the stage's ops read; `exchanged` those that replicas exchange, so that each needs all of the cotangent that it
    takes part with. Where a program has `choices`, each op runs as these say.
    """
    strategies = axis_strategies(factors, flow, splits, cut, outside, choices)
    walks = [ForwardWalk(graph, strategies, prices, hopeful=hopeful).walk() for hopeful in (False, True)]
    whole = outside | exchanged
    found = [(walk, _CotangentWalk(graph, flow, walk, prices, whole).cheapest()) for walk in walks]
    walk, back = min(found, key=lambda pair: round(pair[0].seconds + pair[1].seconds, _DIGITS))
    unsummed = frozenset(back.steps())

    def may_stay(node: fx.Node) -> bool:
        results = {node, *filter(is_item, node.users)}
        return exchanged.isdisjoint(results) and (node in unsummed or not flow.through_inputs(node))

    return _CotangentMarks(flow, walk, may_stay).deduction(graph, splits)


def axis_strategies(
    factors: FactorMap,
    flow: Flow,
    splits: Splits,
    cut: SequenceCut = UNCUT,
    outside: frozenset[fx.Node] = frozenset(),
    choices: Choices | None = None,
) -> Strategies:
    """Return how ops can run, and leaves lie, along an axis inside stages; see `deduce_tensor_axis`."""
    given = factors, flow, splits, cut, True, outside
    return Strategies(*given) if choices is None else ProgramStrategies(*given, choices)


class _CotangentMarks:
    """The backward walk: marks the edges that give back summands, from the last op to the first.

    `may_stay` tells of which values the cotangent may stay unsummed, if all consumers give back summands.
    """

    def __init__(self, flow: Flow, walk: Walk, may_stay: Callable[[fx.Node], bool]) -> None:
        self.flow, self.walk, self.may_stay = flow, walk, may_stay
        self.marked: dict[fx.Node, OpStrategy] = {}
        self.flags: dict[fx.Node, list[bool]] = defaultdict(list)
        self.summed: set[fx.Node] = set()

    def deduction(self, graph: Graph, splits: Splits) -> AxisDeduction:
        """Return the walk with all edges marked."""
        for node in reversed(graph.graph.nodes):
            self.visit(node)
        return AxisDeduction(splits, self.marked, self.walk.made, self.walk.states, frozenset(self.summed))

    def start(self, outputs: Iterable[fx.Node]) -> None:
        """Take note of outputs: the gradient of one that is whole in all replicas comes to one of them only."""
        for node in outputs:
            if isinstance(self.walk.states.get(node), Whole):
                self.flags[node].append(True)

    def visit(self, node: fx.Node) -> None:
        if is_item(node):
            return  # decided with its op, for all results alike
        results = [node, *(user for user in node.users if is_item(user))]
        flags = [flag for result in results for flag in self.flags[result]]
        decision = self.walk.decisions.get(node)
        if flags and all(flags) and self.may_stay(node) and self._passes_on(node, decision):
            self.summed.update(results)
        if decision is not None:
            self.marked[node] = self._marked(node, decision)
            for need in self.marked[node].needs if self._has_cotangent(results) else ():
                self.flags[need.node].append(need.summed_cotangent)

    def _has_cotangent(self, results: Iterable[fx.Node]) -> bool:
        """Tell whether results may have one: what is read for its form alone (`zeros_like`) has none to give back."""
        made = [result for result in results if result in self.flow.differentiable]
        users = chain.from_iterable(result.users for result in made)
        return any(user.op == "output" or user in self.flow.differentiable for user in users)

    def _passes_on(self, node: fx.Node, decision: OpStrategy | None) -> bool:
        """Tell whether summands of a cotangent go on as such; not those of a leaf that is split, and read whole."""
        if decision is None:
            return not isinstance(self.walk.states.get(node), SplitOn)
        return propagates_partial(node, decision, self.flow)

    def _marked(self, node: fx.Node, decision: OpStrategy) -> OpStrategy:
        def mark(need: OperandNeed) -> OperandNeed:
            summed = gives_summands(node, decision, need, self.flow, of_summands=node in self.summed)
            return replace(need, summed_cotangent=summed)

        return replace(decision, needs=tuple(map(mark, decision.needs)))


@dataclass(frozen=True, slots=True)
class _AxisReading:
    """How a value is read: in which state, and what of its cotangent comes back (None: nothing)."""

    state: AxisState
    summed: bool | None


Readings = frozenset[_AxisReading]
NONE: Readings = frozenset()


class _BackBranch(Branch[fx.Node]):
    """One walk back so far: its seconds, how values not come to yet are read, and which cotangents stay summands.

    The seconds are of all moves of activations to their readers, and of cotangents back. Its steps are the activations
    whose cotangents stay in summands; of an op with several results, it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.readings: dict[fx.Node, Readings] = {}

    @property
    def future(self) -> object:
        """All that what is still to come depends on."""
        return frozenset(self.readings.items())

    def copy(self) -> _BackBranch:
        """Return the same walk, to go on in another way."""
        other = copy(self)
        other.readings = dict(self.readings)
        return other


class _CotangentWalk:
    """Walks back over a graph whose forward is decided."""

    def __init__(self, graph: Graph, flow: Flow, walk: Walk, prices: Prices, outside: frozenset[fx.Node]) -> None:
        self.graph, self.flow, self.decided, self.prices, self.outside = graph, flow, walk, prices, outside

    def cheapest(self) -> _BackBranch:
        """Return the cheapest walk found."""
        tracks: Sequence[_BackBranch] = [_BackBranch()]
        for node in reversed(self.graph.graph.nodes):
            if node.op == "call_function" and not is_item(node):
                tracks = beam([after for track in tracks for after in self._before(track, node)])
        return beam(tracks)[0]

    def _before(self, track: _BackBranch, node: fx.Node) -> Iterator[_BackBranch]:
        """Yield the walks that go on back from one past an op."""
        results = [node, *filter(is_item, node.users)]
        read = {result: track.readings.pop(result, NONE) for result in results}
        other = track.copy() if self._may_stay(node, read) else None
        yield self._passed(track, node, read, stays=False)
        if other is not None:
            other.add(node)
            other.departures += 1
            yield self._passed(other, node, read, stays=True)

    def _may_stay(self, node: fx.Node, read: Mapping[fx.Node, Readings]) -> bool:
        flags = {reading.summed for readings in read.values() for reading in readings} - {None}
        inside = self.flow.through_inputs(node) and self.outside.isdisjoint(read)
        return flags == {True} and inside and passes_on_exactly(node, self.decided.decisions.get(node), self.flow)

    def _passed(
        self, track: _BackBranch, node: fx.Node, read: Mapping[fx.Node, Readings], *, stays: bool
    ) -> _BackBranch:
        for result, readings in read.items():
            track.seconds += self._seconds(result, readings, stays)
        decision = self.decided.decisions.get(node)
        for need in decision.needs if decision else ():
            summed = gives_summands(node, decision, need, self.flow, of_summands=stays) if decision else False
            back = summed if node in self.flow.differentiable and need.node in self.flow.differentiable else None
            self._read(track, need.node, _AxisReading(need.state, back))
        return track

    def _seconds(self, node: fx.Node, readings: Readings, stays: bool) -> float:
        """Return what it takes to bring a value to its readers, and its cotangent back."""
        keys = {(reading.state, bool(reading.summed) and not stays) for reading in readings}
        state, trained = self.decided.states.get(node), node in self.flow.differentiable
        if state is None:
            return 0.0
        moved = sum(self.prices.change(node, state, key, summed=summed, trained=trained) for key, summed in keys)
        return moved - sum(self.prices.hidden(node, state, key) for key, summed in keys if summed and trained)

    def _read(self, track: _BackBranch, node: fx.Node, reading: _AxisReading) -> None:
        """Note how an activation is read; gradients of parameters are added up in the end, whatever else reads them."""
        if self.flow.through_inputs(node):
            track.readings[node] = track.readings.get(node, NONE) | {reading}
        elif reading.summed:
            track.seconds += self.prices.late_sum(node)
