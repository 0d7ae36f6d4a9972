"""Carries messages between ranks that are threads of one process and take turns; see `hetu_fx.comm_ops.wire.transport`.

Tensors are copied, so that ranks share no more than processes do. Sums are made in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.threads.meetings import Act, CollectiveCall, Members, ThreadMeeting, ThreadMeetings
from hetu_fx.comm_ops.wire.threads.thread_mail import PendingSend, ThreadMailbox, ThreadRoute
from hetu_fx.comm_ops.wire.threads.turns import RoundRobin
from hetu_fx.comm_ops.wire.transport import WorldMessage
from hetu_fx.errors import CommError

_REDUCE: Mapping[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class InProcessTransport:
    """What the threads of a run have together: whose turn it is, and what is under way."""

    def __init__(self, size: int) -> None:
        self.world = Members("world", tuple(range(size)))
        self.turns, self.meetings, self.mail = RoundRobin(), ThreadMeetings(), ThreadMailbox()

    def check_empty(self) -> None:
        """Raise CommError where something is under way that nobody has waited for."""
        left = [*self.meetings.left(), *self.mail.left()]
        if left:
            raise CommError("the ranks have ended, but what they began has not:\n  " + "\n  ".join(left))


class ThreadWork:
    """A call under way: a collective, or one end of a message; `what` is waited for."""

    def __init__(self, pending: ThreadMeeting | PendingSend, what: object, turns: RoundRobin) -> None:
        self._pending, self._what, self._turns = pending, what, turns

    def wait(self) -> None:
        """Let others go on until those it needs are there. Raises DivergedError where they come for something else."""
        if not self._pending.is_over:
            self._turns.wait_until(lambda: self._pending.is_over, self._what)
        self._pending.check()

    def is_completed(self) -> bool:
        """Tell whether they are."""
        return self._pending.is_over


class ThreadTransport:
    """The side of one rank."""

    def __init__(self, office: InProcessTransport, rank: int) -> None:
        self._office, self._rank = office, rank

    def connect(self, members: Sequence[int], name: str, timeout: timedelta) -> Members:
        """Return the group; nobody has to meet for it."""
        return Members(name, tuple(members))

    def connects_late(self, device: torch.device) -> bool:
        """Say no: nothing has to be connected."""
        return False

    def is_native(self, group: Members, device: torch.device) -> bool:
        """Say yes for all but the host, from which messages go as over gloo."""
        return device.type != "cpu"

    def device(self, group: Members) -> torch.device:
        """Return the host."""
        return torch.device("cpu")

    def all_reduce(
        self, x: Flat, group: Members, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, is_async: bool = False
    ) -> ThreadWork | None:
        """Reduce in the order of the ranks."""
        reduce = _REDUCE[op]
        return self._meet(
            group, CollectiveCall("all_reduce", f"{_form(x)}, {op}"), x.tensor, partial(_all_reduce, reduce), is_async
        )

    def all_gather(self, parts: list[Flat], x: Flat, group: Members, *, is_async: bool = False) -> ThreadWork | None:
        """Copy each one's to all."""
        return self._meet(group, CollectiveCall("all_gather", _form(x, parts)), (parts, x), _all_gather, is_async)

    def broadcast(self, x: Flat, source: int, group: Members) -> ThreadWork | None:
        """Copy one's to the others."""
        call = CollectiveCall("broadcast", f"{_form(x)} from rank {source}")
        return self._meet(group, call, x.tensor, partial(_broadcast, source), True)

    def reduce_scatter(
        self, result: Flat, parts: list[Flat], group: Members, *, is_async: bool = False
    ) -> ThreadWork | None:
        """Sum what is for each, in the order of the ranks."""
        call = CollectiveCall("reduce_scatter", _form(result, parts))
        return self._meet(group, call, (result, parts), _reduce_scatter, is_async)

    def post(
        self, receives: Sequence[WorldMessage], sends: Sequence[WorldMessage], group: Members
    ) -> tuple[list[ThreadWork], list[ThreadWork]]:
        """Put them in the mail."""
        mail, turns, own = self._office.mail, self._office.turns, self._rank
        arriving = [(ThreadRoute(group, peer, own, tag), x) for peer, x, tag in receives]
        leaving = [(ThreadRoute(group, own, peer, tag), x) for peer, x, tag in sends]
        return (
            [ThreadWork(mail.receive(way, x), f"a message from {way}", turns) for way, x in arriving],
            [ThreadWork(mail.send(way, x), f"its message from {way} to be received", turns) for way, x in leaving],
        )

    def _meet(self, group: Members, call: CollectiveCall, brings: Any, act: Act, is_async: bool) -> ThreadWork | None:
        meeting = self._office.meetings.come(group, self._rank, call, brings, act)
        work = ThreadWork(meeting, meeting, self._office.turns)
        if is_async:
            return work
        work.wait()
        return None


def _form(buffer: Flat, buffers: Sequence[Flat] = ()) -> str:
    """Tell what must be the same on all: of a device's tensors what each gives or gets, as NCCL takes unequal ones."""
    x, parts = buffer.tensor, [each.tensor for each in buffers]
    size = [part.numel() for part in parts] if parts and x.device.type != "cpu" else x.numel()
    return f"{size} of {x.dtype}"


@torch.no_grad()
def _all_reduce(reduce: Callable[[Tensor, Tensor], Tensor], brought: Mapping[int, Tensor]) -> None:
    first, *others = brought.values()
    total = first.clone()
    for other in others:
        total = reduce(total, other)
    for x in brought.values():
        x.copy_(total)


@torch.no_grad()
def _all_gather(brought: Mapping[int, tuple[list[Flat], Flat]]) -> None:
    own = [x for _, x in brought.values()]
    for parts, _ in brought.values():
        for part, x in zip(parts, own, strict=True):
            part.copy_from(x)


@torch.no_grad()
def _broadcast(source: int, brought: Mapping[int, Tensor]) -> None:
    for rank, x in brought.items():
        if rank != source:
            x.copy_(brought[source])


@torch.no_grad()
def _reduce_scatter(brought: Mapping[int, tuple[Flat, list[Flat]]]) -> None:
    for place, (result, _) in enumerate(brought.values()):
        first, *others = (parts[place].tensor for _, parts in brought.values())
        total = first.clone()
        for other in others:
            total += other
        result.tensor.copy_(total)
