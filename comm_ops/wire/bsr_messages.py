"""The messages of a batched send-receive as flat bytes: room for them, and their way from rank to rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetu_fx.comm_ops.wire import p2p
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded


class Room:
    """Memory for messages that is used again: what a system gives anew it clears first, which takes as long as a copy.

    It is as large as the most that has been asked for, or the memory that it is given, if that is enough.
    """

    def __init__(self, memory: Tensor | None = None) -> None:
        self._memory = memory

    def take(self, sizes: Mapping[int, int], device: torch.device) -> dict[int, Tensor]:
        """Give so many bytes for each peer; what was given before must be needed no longer."""
        total = sum(sizes.values())
        if self._memory is None or self._memory.numel() < total or self._memory.device != device:
            self._memory = None  # gone before the new one is there
            self._memory = torch.empty(total, dtype=torch.uint8, device=device)
        parts = self._memory.narrow(0, 0, total).split(list(sizes.values()))
        return dict(zip(sizes, parts, strict=True))


@dataclass(frozen=True)
class Rooms:
    """Room for one round's messages."""

    arriving: Room = field(default_factory=Room)
    leaving: Room = field(default_factory=Room)


@dataclass(frozen=True, slots=True)
class Messages:
    """One rank's messages of one round, flat bytes by peer: ready to be sent, and room for what arrives.

    Tensors are on `device`; the messages may be in host memory. `here` are those that need not be sent: this rank
    reads them where the sender has packed them.
    """

    arriving: Mapping[int, Tensor]
    leaving: Mapping[int, Tensor]
    device: torch.device
    here: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def peers(self) -> list[int]:
        """The ranks that messages go to or come from."""
        return sorted({*self.arriving, *self.leaving})


@dataclass(frozen=True)
class Sending:
    """Messages under way."""

    messages: Messages
    posted: p2p.PendingMessages
    table: GroupTable

    def wait(self) -> dict[int, Tensor]:
        """Wait until all have left and arrived; gives all that is for this rank, by sender. Raises CommError as `post`.

        They stand in the room that was made for them.
        """
        if self.messages.peers:
            with _guarded(self.messages, self.table):
                self.posted.wait()
        arrived = {**self.messages.arriving, **self.messages.here}
        return {sender: message.to(self.messages.device) for sender, message in arrived.items()}


def post(messages: Messages, table: GroupTable) -> Sending:
    """Start to send messages and to receive those that arrive. Raises CommError where a peer is dead."""
    posted = p2p.PendingMessages(())
    if messages.peers:
        receives, sends = (
            [(peer, message, p2p.Tag.SLICES) for peer, message in sorted(by_peer.items())]
            for by_peer in (messages.arriving, messages.leaving)
        )
        with _guarded(messages, table):
            posted = p2p.post(receives, sends, table)
    return Sending(messages, posted, table)


def _guarded(messages: Messages, table: GroupTable) -> AbstractContextManager[None]:
    """Count as waiting for the peers, and name them where they fail."""
    return guarded("batched send-receive", [table.rank, *messages.peers], table)
