"""Run one stage's graphs over the micro-batches of a step, in the order that the schedule says.

The engine holds no state between steps. It knows one rank's stage, whole or in chunks that have a graph each: what it
is fed with, what it hands on, and that cotangents come back the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.torch_private import run_backward
from hetu_fx.plans.schedule import Order, Phase
from hetu_fx.program.program import Bindings
from hetu_fx.switching.step.stage_p2p import StageP2P
from hetu_fx.switching.step.timer import ComputeTimer
from hetu_fx.transforms.lowering.later_products import LaterProducts
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, ResultKind, SlotKind

Feeds = Mapping[tuple[SlotKind, str], Any]
_LATER = SlotKind.LATER, "later"


@dataclass(frozen=True)
class MicroBatchFeeds:
    """One micro-batch as one stage sees it: its inputs and random state, and what its sizes are."""

    rows: int
    feeds: Feeds
    bindings: Bindings


@dataclass
class StageOutcome:
    """What a stage has made of a step.

    Attributes:
        timer: time in this rank's own ops.
        loss: sum of the micro-batches' losses; None if the stage has none, or no rows.
        values: per output name, one tensor per micro-batch that had rows.
        updates: new buffer values by name, of the last micro-batch.
        checks: by the name of a check, the sum over micro-batches of what it says; more than zero where it raises.
    """

    timer: ComputeTimer
    loss: Tensor | None = None
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)
    checks: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Flight:
    """A micro-batch between its forward and its backward."""

    received: dict[str, Tensor]
    later: LaterProducts | None
    sent: dict[str, Tensor]
    loss: Tensor | None


class _Arguments:
    """What a stage's graph is called with in one step: what all micro-batches share is put in its place once."""

    def __init__(self, slots: Sequence[tuple[SlotKind, str]], shared: Feeds) -> None:
        self._shared = [shared.get(slot) for slot in slots]
        self._own = [(place, slot) for place, slot in enumerate(slots) if slot not in shared]

    def of(self, *feeds: Feeds) -> list[Any]:
        """Return the arguments for one micro-batch; `feeds` have the rest."""
        arguments = self._shared.copy()
        for place, slot in self._own:
            arguments[place] = next(known[slot] for known in feeds if slot in known)
        return arguments


@dataclass(frozen=True)
class Chunk:
    """A chunk of a stage, or all of it: its graph, and what runs that."""

    device: DeviceGraph
    module: Callable[..., Any]
    _slots: list[tuple[SlotKind, str]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_slots", [(slot.kind, slot.name) for slot in self.device.slots])

    def arguments(self, shared: Feeds) -> _Arguments:
        """Return the arguments of a step, but for those of micro-batches."""
        return _Arguments(self._slots, shared)


class Engine:
    """Runs the stage graphs of one rank, one for each of its chunks."""

    def __init__(self, chunks: Sequence[Chunk], p2p: StageP2P) -> None:
        self.chunks, self.p2p = chunks, p2p

    def run(
        self,
        orders: Sequence[Order],
        micro_batches: Sequence[MicroBatchFeeds],
        shared: Feeds,
        *,
        train: bool,
        timer: ComputeTimer,
        skips_empty: bool = True,
        root: float = 1.0,
        before_last_gradients: Callable[[], None] | None = None,
    ) -> StageOutcome:
        """Run this stage's actions in order; gradients accumulate in the leaves among `shared`.

        Args:
            orders: of every stage: forwards, and backwards if `train`.
            micro_batches: by number.
            shared: parameters, buffers, constants and counts, the same for all micro-batches.
            train: keep what backwards need.
            timer: runs while this rank computes.
            skips_empty: pass over micro-batches without rows, all stages alike; not where replicas talk in the middle
                of the model.
            root: the gradient of the loss that backwards begin with.
            before_last_gradients: called once, before the last action that makes gradients.
        """
        outcome, flights = StageOutcome(timer=timer), dict[tuple[int, int], _Flight]()
        waiting = dict[tuple[int, int], LaterProducts]()
        todos = tuple(
            tuple(action for action in order if micro_batches[action.micro_batch].rows or not skips_empty)
            for order in orders
        )
        self.p2p.start(todos)
        arguments = [chunk.arguments(shared) for chunk in self.chunks]
        todo = todos[self.p2p.stage]
        cut = {(action.chunk, action.micro_batch) for action in todo if action.phase is Phase.WEIGHT_GRADIENT}
        last = max((i for i, action in enumerate(todo) if action.phase is not Phase.FORWARD), default=None)
        for number, action in enumerate(todo):
            micro, chunk = micro_batches[action.micro_batch], self.chunks[action.chunk]
            key = action.chunk, action.micro_batch
            if number == last and before_last_gradients is not None:
                before_last_gradients()
            match action.phase:
                case Phase.FORWARD:
                    later = LaterProducts() if key in cut else None
                    flights[key] = self._forward(chunk, micro, arguments[action.chunk], later, outcome, train)
                case Phase.INPUT_GRADIENT | Phase.BACKWARD:
                    flight = flights.pop(key)
                    self._backward(micro, flight, outcome, root)
                    if flight.later is not None:
                        waiting[key] = flight.later
                case Phase.WEIGHT_GRADIENT:
                    self._make_weights(waiting.pop(key), outcome)
        self.p2p.finish()
        return outcome

    def forward(self, micro: MicroBatchFeeds, shared: Feeds, outcome: StageOutcome) -> None:
        """Run one micro-batch of a pipeline of one stage under ordinary autograd, which the outcome stays part of."""
        (chunk,) = self.chunks
        arguments = chunk.arguments(shared).of({_LATER: None}, micro.feeds)
        self._collect(chunk, self._call(chunk, arguments, outcome), outcome, detaches=False)

    def _forward(
        self,
        chunk: Chunk,
        micro: MicroBatchFeeds,
        arguments: _Arguments,
        later: LaterProducts | None,
        outcome: StageOutcome,
        train: bool,
    ) -> _Flight:
        received = self._receive(chunk, micro, train)
        own: Feeds = {_LATER: later} | {(SlotKind.RECEIVED, name): value for name, value in received.items()}
        with torch.set_grad_enabled(train):
            results = self._call(chunk, arguments.of(own, micro.feeds), outcome)
        flight = _Flight(received, later, *self._collect(chunk, results, outcome, detaches=True))
        self.p2p.send(flight.sent, micro.bindings)
        return flight

    def _collect(
        self, chunk: Chunk, results: Sequence[Tensor], outcome: StageOutcome, *, detaches: bool
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Add what a micro-batch has made to the outcome; return what is to be sent, by name, and its loss."""
        sent: dict[str, Tensor] = {}
        loss: Tensor | None = None
        for result, value in zip(chunk.device.results, results, strict=True):
            kept = value.detach() if detaches else value
            match result.kind:
                case ResultKind.SENT:
                    sent[result.name] = value
                case ResultKind.LOSS:
                    loss, outcome.loss = value, kept if outcome.loss is None else outcome.loss + kept
                case ResultKind.VALUE:
                    outcome.values.setdefault(result.name, []).append(kept)
                case ResultKind.BUFFER_UPDATE:
                    outcome.updates[result.name] = value.detach()
                case ResultKind.CHECK:
                    before = outcome.checks.get(result.name)
                    outcome.checks[result.name] = value if before is None else before + value
        return sent, loss

    def _receive(self, chunk: Chunk, micro: MicroBatchFeeds, train: bool) -> dict[str, Tensor]:
        received = self.p2p.receive(micro.bindings)
        for handover in chunk.device.handovers_in:
            received[handover.value.name].requires_grad_(train and handover.value.differentiable)
        return received

    def _backward(self, micro: MicroBatchFeeds, flight: _Flight, outcome: StageOutcome, root: float) -> None:
        cotangents = self.p2p.receive_back(micro.bindings)
        roots = [(flight.sent[name], grad) for name, grad in cotangents.items() if flight.sent[name].requires_grad]
        if flight.loss is not None and flight.loss.requires_grad:
            roots.append((flight.loss, _filled(flight.loss, root)))
        with outcome.timer:
            if roots:
                run_backward([root for root, _ in roots], [grad for _, grad in roots])
        gradients = {name: _gradient(x) for name, x in flight.received.items() if x.requires_grad}
        self.p2p.send_back(gradients, micro.bindings)

    def _make_weights(self, later: LaterProducts, outcome: StageOutcome) -> None:
        self.p2p.go_on()
        with outcome.timer:
            later.make()

    def _call(self, chunk: Chunk, arguments: list[Any], outcome: StageOutcome) -> tuple[Any, ...]:
        with outcome.timer:
            return tuple(chunk.module(*arguments))


def _gradient(received: Tensor) -> Tensor:
    return torch.zeros_like(received) if received.grad is None else received.grad


def _filled(loss: Tensor, root: float) -> Tensor:
    """Return a gradient of a loss; what its dtype cannot hold is infinite there."""
    return torch.full_like(loss, root, dtype=torch.float64).to(loss.dtype)
