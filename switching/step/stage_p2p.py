"""Values between the stages of a pipeline: forward to later stages, cotangents back.

What an action has made leaves in one call with what a later action needs: the next one (`plans.schedule.at_once`), but
on a device that sends by itself maybe a later one (`plans.schedule.departures`). NCCL carries out a rank's calls one
after another, and in 1F1B neighbours have something for each other at the same time, so that each would wait in a call
that only sends. Only what arrives is waited for: gloo's send ends when its receive is posted, which a busy neighbour
does late. A message is kept until something has come back that the receiver made after it took it, so that a stage
holds those of the micro-batches that it has in flight, and one more, of however many.

Where the later stage stands on another node and several of its ranks want the same, each gets a share over the link
between the nodes and passes it on inside its own (H2's slice-send then gather), if that is cheaper on the links.

A stage may hold several chunks of the model, each a part of the pipeline (`plans.schedule.Action`): what they have for
each other stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import sympy
import torch
from torch import Tensor

from hetu_fx.annotations.annotation import cotangent
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, TensorMove, plan_on_links
from hetu_fx.comm_ops.wire.bsr_run import exchange, unpack
from hetu_fx.comm_ops.wire.fixed_messages import FixedMessages
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded
from hetu_fx.comm_ops.wire.p2p import Message, PendingMessages, Tag, post
from hetu_fx.plans.schedule import Action, Order, Phase, arrivals, at_once, departures, infer_deal, takings
from hetu_fx.program.program import Bindings, evaluate
from hetu_fx.transforms.specialize.device_graph import Handover


@dataclass(frozen=True)
class Ends:
    """What a part of a pipeline takes from earlier parts, and what it hands to later ones."""

    handovers_in: Sequence[Handover]
    handovers_out: Sequence[Handover]


class StageP2P:
    """All that one rank's stage sends and receives, as it runs its actions one after another.

    `chunks` are the ends of each chunk that the stage holds. `device` is where this rank computes; the other ends may
    do so on one of another kind.
    """

    def __init__(self, stage: int, chunks: Sequence[Ends], table: GroupTable, device: torch.device) -> None:
        self.stage, self._table, self._device = stage, table, device
        self._ways = [_StageRoutes.of(ends, table, device) for ends in chunks]
        self._orders: tuple[Order, ...] = ()
        self.start(((),) * (stage + 1))

    def start(self, orders: tuple[Order, ...]) -> None:
        """Begin a step in which the stages of the pipeline run these actions, each in its order."""
        if orders != self._orders:
            self._orders, self._order = orders, orders[self.stage]
            self._deal = infer_deal(orders)
            waits = len(orders) > 1 and self._table.is_native(self._device)
            self._departures = (departures if waits else at_once)(orders, self.stage)
            self._takings = takings(orders, self.stage)
            self._arrivals = arrivals(orders, self.stage)
        self._calls = 0
        self._here: dict[tuple[int, int, int], Mapping[str, Tensor]] = {}
        self._ready: list[_Leaving] = []
        self._in_flight: list[_InFlight] = []

    def receive(self, bindings: Bindings) -> dict[str, Tensor]:
        """Begin a forward: return this rank's pieces of the values from earlier stages, by name."""
        return dict(self._swap(self._next.values_in, bindings))

    def receive_back(self, bindings: Bindings) -> dict[str, Tensor]:
        """Begin a backward: return the cotangents of what it has sent by name, the sum where several stages read it."""
        total: dict[str, Tensor] = {}
        for name, piece in self._swap(self._next.cotangents_in, bindings):
            total[name] = total[name] + piece if name in total else piece
        return total

    def send(self, values: Mapping[str, Tensor], bindings: Bindings) -> None:
        """End a forward: this rank's pieces of what later stages read."""
        self._pack(self._last.values_out, values, bindings)

    def send_back(self, cotangents: Mapping[str, Tensor], bindings: Bindings) -> None:
        """End a backward: this rank's pieces of the cotangents of what it has received."""
        self._pack(self._last.cotangents_out, cotangents, bindings)

    def go_on(self) -> None:
        """Begin an action that needs nothing of other stages and makes nothing for them: send what leaves by then."""
        self._post(())

    def finish(self) -> None:
        """End a step: send what is left, and wait until everything has been taken."""
        self._post((), ends=True)

    @property
    def _next(self) -> _StageRoutes:
        """Return the ways of the action that is about to begin."""
        return self._ways[self._order[self._calls].chunk]

    @property
    def _last(self) -> _StageRoutes:
        """Return the ways of the action that has begun last."""
        return self._ways[self._order[self._calls - 1].chunk]

    def _pack(self, channels: Sequence[Channel], values: Mapping[str, Tensor], bindings: Bindings) -> None:
        action = self._order[self._calls - 1]
        for channel in channels:
            if self._stays(channel):
                self._here[channel.key(action)] = {name: values[name].detach() for name in channel.names}
                continue
            key, messages = (action.passage, channel.receiver), channel.leaving(values, bindings)
            when = self._departures[key], self._arrivals[key], self._taken(action, channel)
            self._ready.append(_Leaving(*when, messages))

    def _stays(self, channel: Channel) -> bool:
        """Tell whether both ends are chunks of this stage."""
        return len(self._ways) > 1 and self._deal.stage(channel.receiver) == self._deal.stage(channel.sender)

    def _taken(self, action: Action, channel: Channel) -> int:
        """Return the number of the own action before which something arrives that was made after this was taken."""
        answers = self._last.cotangents_in if action.phase is Phase.FORWARD else self._last.values_in
        does_answer = any(other.sender == channel.receiver and other.handovers for other in answers)
        return self._takings[action.passage, channel.receiver] if does_answer else len(self._order)

    def _swap(self, channels: Sequence[Channel], bindings: Bindings) -> Iterator[tuple[str, Tensor]]:
        for channel in filter(self._stays, channels):
            yield from self._here.pop(channel.key(self._order[self._calls])).items()
        channels = [channel for channel in channels if not self._stays(channel)]
        messages = [channel.messages(bindings) for channel in channels]
        rooms = [message.direct.room() for message in messages]
        self._post(rooms)
        for channel, message, room in zip(channels, messages, rooms, strict=True):
            yield from zip(channel.names, message.pieces(room), strict=True)

    def _post(self, rooms: Sequence[Mapping[int, Tensor]], *, ends: bool = False) -> None:
        """Make the next call, wait until all is there that arrives with it, and forget what is known to be taken.

        Args:
            rooms: for what arrives, by channel and sender.
            ends: it is the last call, after which all has been taken.
        """
        number = self._calls
        self._calls += 1
        leaving = sorted((one for one in self._ready if one.call <= number), key=lambda one: one.wanted)
        self._ready = [one for one in self._ready if one.call > number]
        receives, sends = _messages(rooms), _messages([one.messages for one in leaving])
        known = len(self._order) if ends else number
        taken = max((one.taken for one in leaving), default=number)
        peers = {peer for peer, _, _ in (*receives, *sends)}
        over = peers.union(*(one.peers for one in self._in_flight if one.taken <= known))
        if not over:
            return
        with guarded("hand-over between stages", [self._table.rank, *sorted(over)], self._table):
            if peers:
                posted = post(receives, sends, self._table)
                self._in_flight.append(_InFlight(taken, peers, posted))
                posted.arrive()
            self._forget(known)

    def _forget(self, number: int) -> None:
        """Let go what has been taken by the time that the arrivals of an action, by number, are there."""
        for one in self._in_flight:
            if one.taken <= number:
                one.posted.leave()
        self._in_flight = [one for one in self._in_flight if one.taken > number]


@dataclass(frozen=True)
class _StageRoutes:
    """The channels of a chunk."""

    values_in: Sequence[Channel]
    values_out: Sequence[Channel]
    cotangents_in: Sequence[Channel]
    cotangents_out: Sequence[Channel]

    @classmethod
    def of(cls, ends: Ends, table: GroupTable, device: torch.device) -> _StageRoutes:
        inward, outward = ends.handovers_in, ends.handovers_out
        given = (inward, False), (outward, False), (outward, True), (inward, True)
        return cls(*(_channels(handovers, table, device, back=back) for handovers, back in given))


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Messages by receiver, the call that they leave with, and the action at whose start they are known to be taken.

    `wanted` is the action of the other end that waits for them, by number: of those that leave with one call the first
    goes first, as they are told apart by their order alone.
    """

    call: int
    wanted: int
    taken: int
    messages: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """Messages under way, whom they are from or for, and the action at whose start they are known to be taken."""

    taken: int
    peers: set[int]
    posted: PendingMessages


@dataclass(frozen=True)
class ChannelMessages:
    """What goes through a channel in micro-batches of one size: found out once for each.

    `relay` passes on what came from another node, among the ranks of the later stage; None: nothing does.
    """

    direct: FixedMessages
    relay: BsrPlan | None
    table: GroupTable
    like: Sequence[Tensor]

    def pieces(self, arrived: Mapping[int, Tensor]) -> list[Tensor]:
        """Return this rank's pieces of the values, from the messages by sender."""
        pieces = self.direct.results(arrived)
        if self.relay is not None:
            # Only ranks of this stage meet here, and all of them do.
            relayed = exchange(self.relay, self.table, self.like, pieces)
            pieces = unpack(self.relay, self.table.rank, pieces, self.like, relayed)
        return [piece for piece in pieces if piece is not None]


class Channel:
    """What goes from one part to another: values forward, or their cotangents `back`; both ends have one."""

    def __init__(self, handovers: Sequence[Handover], table: GroupTable, device: torch.device, *, back: bool) -> None:
        self.handovers = tuple(h for h in handovers if h.value.differentiable) if back else tuple(handovers)
        self.names = [handover.value.name for handover in self.handovers]
        ends = handovers[0].source[1], handovers[0].target[1]
        self.sender, self.receiver = reversed(ends) if back else ends
        self._table, self._device, self._back = table, device, back
        self._symbols = sorted(_symbols_of(self.handovers), key=str)
        self._messages_of = lru_cache(maxsize=512)(self._make)

    def key(self, action: Action) -> tuple[int, int, int]:
        """Return what tells apart what goes through, of all that do through any channel."""
        return self.sender, self.receiver, action.micro_batch

    def leaving(self, values: Mapping[str, Tensor], bindings: Bindings) -> Mapping[int, Tensor]:
        """Return the messages with this rank's pieces of the values, by receiver; they may share their memory."""
        return self.messages(bindings).direct.leaving([values[name].detach() for name in self.names])

    def messages(self, bindings: Bindings) -> ChannelMessages:
        """Return what goes through in a micro-batch of these sizes."""
        return self._messages_of(*[bindings[symbol] for symbol in self._symbols])

    def _make(self, *sizes: int) -> ChannelMessages:
        bindings = dict(zip(self._symbols, sizes, strict=True))
        moves = [_move(h, evaluate(h.value.shape, bindings), self._back) for h in self.handovers]
        plan, rank = plan_on_links(moves, self._table.topology), self._table.rank
        dtypes = [handover.value.dtype for handover in self.handovers]
        like = [torch.empty(0, dtype=dtype, device=self._device) for dtype in dtypes]
        direct = FixedMessages(replace(plan, relay=None), rank, dtypes, self._device)
        return ChannelMessages(direct, plan.relay, self._table, like)


def _symbols_of(handovers: Sequence[Handover]) -> set[sympy.Symbol]:
    """Return what the shapes depend on."""
    sizes = [size for handover in handovers for size in handover.value.shape]
    return {symbol for size in sizes if isinstance(size, sympy.Expr) for symbol in size.free_symbols}


def _channels(
    handovers: Sequence[Handover], table: GroupTable, device: torch.device, *, back: bool
) -> tuple[Channel, ...]:
    """Return one channel for each pair of parts, in the order in which they make what goes through."""
    pairs = sorted({(handover.source, handover.target) for handover in handovers}, reverse=back)
    return tuple(
        Channel([h for h in handovers if (h.source, h.target) == pair], table, device, back=back) for pair in pairs
    )


def _move(handover: Handover, shape: tuple[int, ...], back: bool) -> TensorMove:
    value, target = handover.value, handover.target_annotation
    source, to = (target, cotangent(value.annotation)) if back else (value.annotation, target)
    return TensorMove(source, to, shape, value.dtype.itemsize)


def _messages(by_peers: Sequence[Mapping[int, Tensor]]) -> list[Message]:
    return [(peer, message, Tag.STAGES) for by_peer in by_peers for peer, message in by_peer.items()]
