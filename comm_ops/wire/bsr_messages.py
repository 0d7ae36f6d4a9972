"""The messages of a batched send-receive as flat bytes: room for them, and their way from rank to rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetu_fx.comm_ops.wire import p2p
from hetu_fx.comm_ops.wire.collectives import Exchange
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


def post(messages: Messages, table: GroupTable) -> Exchange[dict[int, Tensor]]:
    """Start to send messages and to receive those that arrive, and give all that is for this rank, by sender.

    They stand in the room that was made for them. Raises CommError where a peer is dead.
    """
    arrived, ranks, what = {**messages.arriving, **messages.here}, (table.rank, *messages.peers), "batched send-receive"

    def bring() -> None:
        arrived.update({sender: message.to(messages.device) for sender, message in arrived.items()})

    exchange = Exchange(ranks, [], bring, table, arrived, what)
    if messages.peers:
        receives, sends = (
            [(peer, message, p2p.Tag.SLICES) for peer, message in sorted(by_peer.items())]
            for by_peer in (messages.arriving, messages.leaving)
        )
        with guarded(what, ranks, table):
            exchange.works.append(p2p.post(receives, sends, table))
    return exchange
