"""A simulated NCCL: what ranks call is carried out as threads do, and written down; then it is told where NCCL hangs.

NCCL's calls are carried out on the device, by each rank one after another in the order of posting. A group call of
sends and receives is over when all of them have met their other end in a call that the peer is in; a collective, when
all members are in it. Messages have no tags: between two ranks of a communicator they meet in the order of posting.
A communicator is made by the first call of each of its members in it, which waits for those of all others.
Gathers and scatters of unequal parts are a group call of broadcasts or reductions, which torch makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetu_fx.comm_ops.wire import threads
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.threads import CollectiveCall, Members, ThreadTransport


@dataclass(frozen=True)
class Sent:
    """One end of a message: to or from a peer, and what it looks like."""

    peer: int
    is_send: bool
    form: str

    @property
    def way(self) -> tuple[int, bool]:
        return self.peer, self.is_send

    def __str__(self) -> str:
        return f"{'sends to' if self.is_send else 'receives from'} rank {self.peer} {self.form}"


@dataclass(frozen=True)
class Posted:
    """One call of one rank in a communicator: a collective, or a group of messages."""

    communicator: str
    members: tuple[int, ...]
    collective: str = ""
    messages: tuple[Sent, ...] = ()

    def __str__(self) -> str:
        what = self.collective or "; ".join(map(str, self.messages))
        return f"{what} (in {self.communicator})"


Programs = Mapping[int, Sequence[Posted]]


class _Stream:
    """What a rank's device has yet to do: the call that it is in, and which of its messages have not met."""

    def __init__(self, rank: int, calls: Sequence[Posted]) -> None:
        self.rank, self._calls, self._at, self.seen = rank, calls, -1, set[str]()
        self.advance()

    @property
    def call(self) -> Posted | None:
        return self._calls[self._at] if self._at < len(self._calls) else None

    def advance(self) -> None:
        self._at += 1
        self.waiting = [] if self.call is None else list(self.call.messages)
        self.seen |= set() if self.call is None else {self.call.communicator}

    def first(self, communicator: str, way: tuple[int, bool]) -> Sent | None:
        """Return its next message of a way, if it is in a call of the communicator."""
        if self.call is None or self.call.communicator != communicator:
            return None
        return next((message for message in self.waiting if message.way == way), None)


def hang_of(programs: Programs) -> str:
    """Return where ranks that post these calls hang, or take one message for another; "" where they come to an end."""
    streams = {rank: _Stream(rank, calls) for rank, calls in programs.items()}
    goes_on = True
    while goes_on:
        goes_on = False
        for stream in streams.values():
            wrong, moved = _step(stream, streams)
            if wrong:
                return wrong
            goes_on |= moved
    stuck = [f"rank {stream.rank}: {stream.call}" for stream in streams.values() if stream.call is not None]
    return "NCCL hangs:\n" + "\n".join(stuck) if stuck else ""


def _step(stream: _Stream, streams: Mapping[int, _Stream]) -> tuple[str, bool]:
    call = stream.call
    if call is None or any(call.communicator not in streams[member].seen for member in call.members):
        return "", False
    return _meet(call, streams) if call.collective else _exchange(stream, call, streams)


def _meet(call: Posted, streams: Mapping[int, _Stream]) -> tuple[str, bool]:
    there = [streams[member].call for member in call.members]
    if any(one is None or not one.collective or one.communicator != call.communicator for one in there):
        return "", False
    if len({one.collective for one in there if one is not None}) > 1:
        return f"unlike collectives meet in {call.communicator}: {[str(one) for one in there]}", False
    for member in call.members:
        streams[member].advance()
    return "", True


def _exchange(stream: _Stream, call: Posted, streams: Mapping[int, _Stream]) -> tuple[str, bool]:
    moved = False
    for way in dict.fromkeys(message.way for message in stream.waiting):
        own = stream.first(call.communicator, way)
        peer, is_send = way
        other = streams[peer].first(call.communicator, (stream.rank, not is_send))
        if own is None or other is None:
            continue
        if own.form != other.form:
            return f"rank {stream.rank} {own}, which meets what rank {peer} {other}", False
        stream.waiting.remove(own)
        streams[peer].waiting.remove(other)
        moved = True
        if not streams[peer].waiting:
            streams[peer].advance()
    if not stream.waiting and stream.call is call:
        stream.advance()
        moved = True
    return "", moved


class RecordingTransport(ThreadTransport):
    """The side of one rank, whose tensors NCCL sends; `posted` is what all ranks have called so far."""

    posted: dict[int, list[Posted]] = {}  # noqa: RUF012 (of all, each run has its own)

    def is_native(self, group: Members, device: torch.device) -> bool:
        return True

    def connects_late(self, device: torch.device) -> bool:
        return True

    def post(self, receives: Any, sends: Any, group: Members) -> Any:
        messages = [_sent(peer, x, tag, is_send=False) for peer, x, tag in receives]
        messages += [_sent(peer, x, tag, is_send=True) for peer, x, tag in sends]
        if messages:
            self._note(group, messages=tuple(messages))
        return super().post(receives, sends, group)

    def all_gather(self, parts: list[Flat], x: Flat, group: Members, *, is_async: bool = False) -> Any:
        call = CollectiveCall("all_gather", _forms(parts))
        return self._meet(group, call, (parts, x), threads._all_gather, is_async)

    def reduce_scatter(self, result: Flat, parts: list[Flat], group: Members, *, is_async: bool = False) -> Any:
        call = CollectiveCall("reduce_scatter", _forms(parts))
        return self._meet(group, call, (result, parts), threads._reduce_scatter, is_async)

    def _meet(self, group: Members, call: Any, brings: Any, act: Any, is_async: bool) -> Any:
        if call.name != "objects":  # which go over gloo
            self._note(group, collective=f"{call.name} of {call.form}")
        return super()._meet(group, call, brings, act, is_async)

    def _note(self, group: Members, **what: Any) -> None:
        self.posted.setdefault(self._rank, []).append(Posted(group.name, group.ranks, **what))


def _forms(parts: Sequence[Flat]) -> str:
    return f"{[part.tensor.numel() for part in parts]} of {parts[0].tensor.dtype}"


def _sent(peer: int, x: Flat, tag: int, *, is_send: bool) -> Sent:
    return Sent(peer, is_send, f"{x.tensor.numel()} of {x.tensor.dtype} with tag {tag:#x}")
