"""Messages between two threads: a send and a receive of one tag meet, and what stands at the sender then is copied.

As with gloo, a message leaves when its receive is posted: a sender that writes to it meanwhile sends something else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.threads.meetings import Members
from hetu_fx.errors import DivergedError


class ThreadRoute(NamedTuple):
    """Messages that arrive in the order in which they were sent."""

    group: Members
    sender: int
    receiver: int
    tag: int

    def __str__(self) -> str:
        return f"rank {self.sender} to rank {self.receiver} with tag {self.tag:#x} in {self.group}"


@dataclass(slots=True, eq=False)
class PendingSend:
    """One end of a message: what is sent, or the room for it."""

    x: Flat
    problem: str = ""
    is_done: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nobody has to wait any longer."""
        return self.is_done or bool(self.problem)

    def check(self) -> None:
        """Raise DivergedError where the other end is of another form."""
        if self.problem:
            raise DivergedError(self.problem)


@dataclass
class ThreadMailbox:
    """The messages of which one end is there."""

    sent: dict[ThreadRoute, deque[PendingSend]] = field(default_factory=dict)
    awaited: dict[ThreadRoute, deque[PendingSend]] = field(default_factory=dict)

    def send(self, way: ThreadRoute, x: Flat) -> PendingSend:
        """Send a buffer; it stays as it is until the message is done."""
        return _met(way, PendingSend(x), self.sent, self.awaited, sends=True)

    def receive(self, way: ThreadRoute, x: Flat) -> PendingSend:
        """Receive a buffer, in `x`."""
        return _met(way, PendingSend(x), self.awaited, self.sent, sends=False)

    def left(self) -> list[str]:
        """Describe the messages of which the other end never came."""
        unread = [f"{len(found)} from {way} never received" for way, found in self.sent.items()]
        return unread + [f"{len(found)} from {way} never sent" for way, found in self.awaited.items()]


def _met(
    way: ThreadRoute,
    own: PendingSend,
    queue: dict[ThreadRoute, deque[PendingSend]],
    others: dict[ThreadRoute, deque[PendingSend]],
    *,
    sends: bool,
) -> PendingSend:
    """Put one end to the other if that is there, else in the queue."""
    if way not in others:
        queue.setdefault(way, deque()).append(own)
        return own
    other = others[way].popleft()
    if not others[way]:
        del others[way]
    _deliver(way, *((own, other) if sends else (other, own)))
    return own


def _deliver(way: ThreadRoute, sent: PendingSend, awaited: PendingSend) -> None:
    forms = [f"{x.tensor.numel()} of {x.tensor.dtype}" for x in (sent.x, awaited.x)]
    if forms[0] != forms[1]:
        problem = f"a message from {way} is sent as {forms[0]} and awaited as {forms[1]}"
        sent.problem = awaited.problem = problem
        raise DivergedError(problem)
    with torch.no_grad():
        awaited.x.copy_from(sent.x)
    sent.is_done = awaited.is_done = True
