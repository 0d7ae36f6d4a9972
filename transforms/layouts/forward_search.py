"""Walk a graph forward and decide how each op runs on one axis, looked ahead by keeping several walks in mind.

Where an op can run by several strategies, or its result lie in several states, the walk goes on in all of them. Two
walks in which all values that are still to be read lie alike have the same future: the cheaper one stays (dynamic
programming over what is alive). A choice is so settled once layouts agree again, by what all ops until then cost,
forward and backward. Only a beam of `WIDTH` walks is kept, the cheapest so far, so the time is linear in the graph.

Where the summands of a cotangent will be added up is decided later, on the way back. The walk takes it to be where they
arise, or, if it is `hopeful`, for nothing where they could flow on; the better of the two walks is known in the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import fx

from hetu_fx.deduction.factors.factors import flat
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.layouts.flow import is_item, tuple_producer
from hetu_fx.transforms.layouts.reshard_cost import Prices, product_flops
from hetu_fx.transforms.layouts.states import SUMMED, AxisState, OperandNeed, OpStrategy, SplitOn
from hetu_fx.transforms.layouts.strategies import Strategies, gives_summands, passes_on_exactly

WIDTH = 16
"""How many walks are kept in mind at once."""

_DIGITS = 9  # sums that differ by less are the same, added in another order

Step = TypeVar("Step")


class Branch(ABC, Generic[Step]):
    """A walk so far: what it costs, how often it left what would be done if all cost the same, and its steps.

    Branches that have gone the same way share those steps.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.departures = 0
        self._trail: tuple[Any, Step] | None = None

    @property
    @abstractmethod
    def future(self) -> object:
        """All that its continuation depends on."""

    def add(self, step: Step) -> None:
        """Take one more step."""
        self._trail = (self._trail, step)

    def steps(self) -> Iterator[Step]:
        """Yield the steps, the last first."""
        trail = self._trail
        while trail is not None:
            trail, step = trail
            yield step


B = TypeVar("B", bound=Branch[Any])


def beam(walks: Sequence[B]) -> Sequence[B]:
    """Return the cheapest walk to each future, no more than `WIDTH` in all, in order of price, then of departures."""
    if len(walks) == 1:
        return walks
    least = min(walk.seconds for walk in walks) or 1.0
    best: dict[object, B] = {}
    for walk in sorted(walks, key=lambda walk: (round(walk.seconds / least, _DIGITS), walk.departures)):
        best.setdefault(walk.future, walk)
    return tuple(best.values())[:WIDTH]


Read = frozenset[tuple[AxisState, bool]]
"""The states in which a value has been read so far, and whether summands of its cotangent come back from there."""

Decided = tuple[fx.Node, OpStrategy | None, AxisState, AxisState]
"""What was decided of a node: how it runs, if it is an op, how it comes out, and how it lies for its readers."""


@dataclass(frozen=True)
class Walk:
    """What was decided.

    Attributes:
        decisions: how each op runs.
        made: how each value comes out of its op.
        states: how it lies for its readers.
        seconds: of work that is repeated, and of moves that are not from an activation to a reader of it.
    """

    decisions: Mapping[fx.Node, OpStrategy]
    made: Mapping[fx.Node, AxisState]
    states: Mapping[fx.Node, AxisState]
    seconds: float


class _ForwardBranch(Branch[Decided]):
    """One walk so far: its seconds (`own_seconds` without moves of activations to readers), and what is alive."""

    def __init__(self, leaves: dict[fx.Node, AxisState]) -> None:
        super().__init__()
        self.own_seconds = 0.0
        self.leaves = leaves
        self.own: dict[fx.Node, AxisState] = {}
        self.read: dict[fx.Node, Read] = {}
        self.open: dict[fx.Node, OpStrategy] = {}  # of ops with several results
        self.passing: dict[fx.Node, bool] = {}  # whether summands of the cotangent could flow on

    @property
    def states(self) -> Mapping[fx.Node, AxisState]:
        """States of all values that are still to be read."""
        return ChainMap(self.own, self.leaves)

    @property
    def future(self) -> object:
        """All that what is still to come depends on."""
        alive = tuple(self.own.items()), tuple(self.open.items()), tuple(self.passing.items())
        return *alive, frozenset(self.read.items())

    def copy(self) -> _ForwardBranch:
        """Return the same walk, to go on in another way."""
        other = copy(self)
        other.own, other.read, other.open = dict(self.own), dict(self.read), dict(self.open)
        other.passing = dict(self.passing)
        return other

    def note(self, node: fx.Node, decision: OpStrategy | None, made: AxisState, state: AxisState) -> None:
        """Note what was decided of a node."""
        self.add((node, decision, made, state))
        self.own[node] = state

    def forget(self, node: fx.Node) -> None:
        """Drop a value that nothing reads any more."""
        self.own.pop(node, None)
        self.read.pop(node, None)
        self.open.pop(node, None)
        self.passing.pop(node, None)


class ForwardWalk:
    """Decides every op of a graph; without `prices` the first strategy is taken everywhere."""

    def __init__(
        self, graph: Graph, strategies: Strategies, prices: Prices | None = None, *, hopeful: bool = False
    ) -> None:
        self.graph, self.factors, self.hopeful = graph, strategies.factors, hopeful
        self.strategies, self.prices = strategies, prices
        self.keep_sums = prices is None
        self.last_reads = _last_reads(graph)

    def walk(self) -> Walk:
        """Return the cheapest walk found.

        Raises:
            DeductionError: an op can run by no strategy; names it, the user's line and the way out.
        """
        leaves = {leaf.node: self.strategies.of_leaf(leaf) for leaf in self.graph.leaves}
        tracks: Sequence[_ForwardBranch] = [_ForwardBranch(leaves)]
        for node in self.graph.graph.nodes:
            if is_item(node):
                for track in tracks:
                    self._take_item(track, node)
            elif node.op == "call_function" and self.factors.is_op(node):
                tracks = beam([after for track in tracks for after in self._after(track, node)])
            for dead in self.last_reads.get(node, ()):
                for track in tracks:
                    track.forget(dead)
        return self._result(beam(tracks)[0], leaves)

    def _take_item(self, track: _ForwardBranch, item: fx.Node) -> None:
        decision = track.open[tuple_producer(item)]
        made = self._item_state(item, decision)
        track.note(item, None, made, made if self.keep_sums else self.strategies.of_item(item, made))

    def _item_state(self, item: fx.Node, decision: OpStrategy) -> AxisState:
        if decision.factor is None:
            return decision.result
        is_cut = decision.factor in flat(self.factors.dims(item))
        return SplitOn(decision.factor, decision.segment) if is_cut else SUMMED

    def _after(self, track: _ForwardBranch, node: fx.Node) -> Iterator[_ForwardBranch]:
        """Yield the walks that go on from one past an op; the first is the walk itself, changed."""
        found = self.strategies.of(node, track.states)
        found = found if self.prices else found[:1]
        choices = [(strategy, state) for strategy in found for state in self._left(track, node, strategy)]
        tracks = [track, *(track.copy() for _ in choices[1:])]
        for number, (after, (strategy, state)) in enumerate(zip(tracks, choices, strict=True)):
            after.departures += number
            if self.prices is not None:
                self._charge(after, node, strategy, state, self.prices)
            after.note(node, strategy, strategy.result, state)
            if any(map(is_item, node.users)):
                after.open[node] = strategy
            yield after

    def _left(self, track: _ForwardBranch, node: fx.Node, strategy: OpStrategy) -> tuple[AxisState, ...]:
        if self.keep_sums:
            return (strategy.result,)
        return self.strategies.of_result(node, strategy.result, track.states)

    def _charge(
        self, track: _ForwardBranch, node: fx.Node, strategy: OpStrategy, state: AxisState, prices: Prices
    ) -> None:
        """Charge what it costs to run an op by a strategy and leave its result in a state, and note what it reads."""
        for need in strategy.needs:
            track.seconds += self._read(track, node, strategy, need, prices)
        trained = node in self.strategies.flow.differentiable
        own = prices.change(node, strategy.result, state, summed=False, trained=trained)
        if strategy.factor is None and meta.is_tensor(node):
            own += prices.repeated(product_flops(node, self.factors.op(node)))
        track.seconds += own
        track.own_seconds += own
        if self.hopeful:
            track.passing[node] = state == strategy.result and passes_on_exactly(node, strategy, self.strategies.flow)

    def _read(
        self, track: _ForwardBranch, node: fx.Node, strategy: OpStrategy, need: OperandNeed, prices: Prices
    ) -> float:
        """Return what it costs to bring a value to one more reader, and note that."""
        flow, state = self.strategies.flow, track.states[need.node]
        summed, before = gives_summands(node, strategy, need, flow), track.read.get(need.node, frozenset())
        if (need.state, summed) in before or (need.state == state and not summed):
            return 0.0
        track.read[need.node] = before | {(need.state, summed)}
        if need.state == state and track.passing.get(need.node, False):
            return 0.0
        trained = need.node in flow.differentiable
        if not flow.through_inputs(need.node):
            moved = prices.change(need.node, state, need.state, summed=False, trained=trained)
            track.own_seconds += moved
            return moved + (prices.late_sum(need.node) if summed else 0.0)
        return prices.change(need.node, state, need.state, summed=summed, trained=trained)

    def _result(self, track: _ForwardBranch, leaves: Mapping[fx.Node, AxisState]) -> Walk:
        steps = list(track.steps())[::-1]
        decisions = {node: decision for node, decision, _, _ in steps if decision is not None}
        made = {node: made for node, _, made, _ in steps}
        states = {**leaves, **{node: state for node, _, _, state in steps}}
        return Walk(decisions, made, states, track.own_seconds)


def _last_reads(graph: Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the values that each node is the last one to read; those that nothing reads go with the node itself."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        found.setdefault(max(node.users, key=order.__getitem__, default=node), []).append(node)
    return found
