"""Where summands of cotangents are added up: each at the value where that is cheapest, once for all its readers.

An op that is split on a factor which an operand lacks gives back a summand of that operand's cotangent on every
device. A cotangent is linear, so if all readers of a value give back summands, these may flow back further, through
any op that runs whole on whole operands, to be added up there: a smaller value, one at which several ways back meet,
or one that lies in parts, where adding up and cutting is one step. On the way, gradients of parameters become
summands too, which are added up when gradients are synchronised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.layouts.beam import beam
from hetu_fx.transforms.layouts.flow import Flow, is_item
from hetu_fx.transforms.layouts.forward_search import Walk
from hetu_fx.transforms.layouts.reshard_cost import Prices
from hetu_fx.transforms.layouts.states import AxisState
from hetu_fx.transforms.layouts.strategies import gives_summands, passes_on_exactly


@dataclass(frozen=True, slots=True)
class _Reading:
    """How a value is read: in which state, and what of its cotangent comes back (None: nothing)."""

    state: AxisState
    summed: bool | None


Readings = frozenset[_Reading]
NONE: Readings = frozenset()


@dataclass(frozen=True, slots=True)
class _Stay:
    """The last value whose cotangent stays in summands, and those after it."""

    after: _Stay | None
    node: fx.Node


class _BackBranch:
    """One walk back so far: its seconds, how values not come to yet are read, and which cotangents stay summands."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.departures = 0
        self.readings: dict[fx.Node, Readings] = {}
        self.stay: _Stay | None = None

    @property
    def future(self) -> object:
        """All that what is still to come depends on."""
        return frozenset(self.readings.items())

    def copy(self) -> _BackBranch:
        """Return the same walk, to go on in another way."""
        other = _BackBranch()
        other.seconds, other.departures, other.stay = self.seconds, self.departures, self.stay
        other.readings = dict(self.readings)
        return other

    def stays(self) -> Iterator[fx.Node]:
        """Yield the values whose cotangents stay in summands."""
        stay = self.stay
        while stay is not None:
            yield stay.node
            stay = stay.after


@dataclass(frozen=True, slots=True)
class Sums:
    """Where sums of cotangents are made.

    Attributes:
        seconds: of all moves of activations to their readers, and of cotangents back.
        unsummed: the activations whose cotangents stay in summands; of an op with several results, it.
    """

    seconds: float
    unsummed: frozenset[fx.Node]


class CotangentWalk:
    """Walks back over a graph whose forward is decided."""

    def __init__(self, graph: Graph, flow: Flow, walk: Walk, prices: Prices, outside: frozenset[fx.Node]) -> None:
        self.graph, self.flow, self.decided, self.prices, self.outside = graph, flow, walk, prices, outside

    def sums(self) -> Sums:
        """Return the cheapest sums found."""
        tracks: Sequence[_BackBranch] = [_BackBranch()]
        for node in reversed(self.graph.graph.nodes):
            if node.op == "call_function" and not is_item(node):
                tracks = beam([after for track in tracks for after in self._before(track, node)])
        best = beam(tracks)[0]
        return Sums(best.seconds, frozenset(best.stays()))

    def _before(self, track: _BackBranch, node: fx.Node) -> Iterator[_BackBranch]:
        """Yield the walks that go on back from one past an op."""
        results = [node, *filter(is_item, node.users)]
        read = {result: track.readings.pop(result, NONE) for result in results}
        other = track.copy() if self._may_stay(node, read) else None
        yield self._passed(track, node, read, stays=False)
        if other is not None:
            other.stay, other.departures = _Stay(other.stay, node), other.departures + 1
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
            self._read(track, need.node, _Reading(need.state, back))
        return track

    def _seconds(self, node: fx.Node, readings: Readings, stays: bool) -> float:
        """Return what it takes to bring a value to its readers, and its cotangent back."""
        keys = {(reading.state, bool(reading.summed) and not stays) for reading in readings}
        state, trained = self.decided.states.get(node), node in self.flow.differentiable
        if state is None:
            return 0.0
        return sum(self.prices.change(node, state, key, summed=summed, trained=trained) for key, summed in keys)

    def _read(self, track: _BackBranch, node: fx.Node, reading: _Reading) -> None:
        """Note how an activation is read; gradients of parameters are added up in the end, whatever else reads them."""
        if self.flow.through_inputs(node):
            track.readings[node] = track.readings.get(node, NONE) | {reading}
        elif reading.summed:
            track.seconds += self.prices.late_sum(node)
