"""What carries the messages of groups: the few calls on which everything else on the wire stands.

`ProcessTransport` is torch.distributed. What takes its place has to keep what callers go by: calls of one group are met
by the same calls of its other members, in one order; messages between two ranks with the same tag arrive in order; and
what was started reads its tensors until it is waited for. Ranks are those of the whole world.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from hetu_fx.base.torch_private import device_types
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.process_group import create_group, has_native_backend

Group: TypeAlias = Any
"""What a transport calls a group; a process group, of torch.distributed."""
WorldMessage = tuple[int, Flat, int]
"""The rank of the world that a buffer goes to or comes from, the buffer, and a tag."""


class Work(Protocol):
    """A call under way."""

    def wait(self) -> Any:
        """Wait until it is done."""

    def is_completed(self) -> bool:
        """Tell whether `wait` would not block."""


class Transport(Protocol):
    """Carries messages between the members of groups."""

    def connect(self, members: Sequence[int], name: str, timeout: timedelta) -> Group:
        """Return the group of some ranks, this one among them, under a name that all give it; collective."""

    def is_native(self, group: Group, device: torch.device) -> bool:
        """Tell whether a group sends tensors of a device from where they are."""

    def connects_late(self, device: torch.device) -> bool:
        """Tell whether groups are connected by the first calls of their members, for which each waits for all."""

    def device(self, group: Group) -> torch.device:
        """Return a device that a group can send from."""

    def all_reduce(
        self, x: Flat, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, is_async: bool = False
    ) -> Work | None:
        """Reduce a tensor over the members, in place."""

    def all_gather(self, parts: list[Flat], x: Flat, group: Group, *, is_async: bool = False) -> Work | None:
        """Fill `parts`, in the order of the group, with what each member has in `x`; all are of one size."""

    def broadcast(self, x: Flat, source: int, group: Group) -> Work | None:
        """Start to fill `x` with what the rank `source` has there."""

    def reduce_scatter(self, result: Flat, parts: list[Flat], group: Group, *, is_async: bool = False) -> Work | None:
        """Sum over the members what each has for this one; `parts` in the order of the group, all of one size."""

    def post(
        self, receives: Sequence[WorldMessage], sends: Sequence[WorldMessage], group: Group
    ) -> tuple[Sequence[Work], Sequence[Work]]:
        """Start messages, all receives before any send; returns what arrives and what leaves."""


class ProcessTransport:
    """Ranks are processes that torch.distributed connects."""

    def connect(self, members: Sequence[int], name: str, timeout: timedelta) -> Group:
        """Create a process group."""
        return create_group(list(members), name, timeout)

    def is_native(self, group: Group, device: torch.device) -> bool:
        """Ask the group's backends."""
        return has_native_backend(group, device)

    def connects_late(self, device: torch.device) -> bool:
        """Say yes but for the host: NCCL does."""
        return device.type != "cpu"

    def device(self, group: Group) -> torch.device:
        """Return the host where it can send from there, as small messages stand there."""
        types = device_types(group)
        return torch.device("cpu") if "cpu" in types else torch.device(sorted(types)[0])

    def all_reduce(
        self, x: Flat, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, is_async: bool = False
    ) -> Work | None:
        """Do it by the collective of that name, as the next ones."""
        work: Work | None = dist.all_reduce(x.tensor, op=op, group=group, async_op=is_async)
        return work

    def all_gather(self, parts: list[Flat], x: Flat, group: Group, *, is_async: bool = False) -> Work | None:
        """Gather bytes: gloo has no gather of int16, for one."""
        work: Work | None = dist.all_gather([p.as_bytes() for p in parts], x.as_bytes(), group=group, async_op=is_async)
        return work

    def broadcast(self, x: Flat, source: int, group: Group) -> Work | None:
        """Start a broadcast of bytes."""
        work: Work | None = dist.broadcast(x.as_bytes(), src=source, group=group, async_op=True)
        return work

    def reduce_scatter(self, result: Flat, parts: list[Flat], group: Group, *, is_async: bool = False) -> Work | None:
        """Sum and scatter."""
        work: Work | None = dist.reduce_scatter(
            result.tensor, [part.tensor for part in parts], group=group, async_op=is_async
        )
        return work

    def post(
        self, receives: Sequence[WorldMessage], sends: Sequence[WorldMessage], group: Group
    ) -> tuple[Sequence[Work], Sequence[Work]]:
        """Start messages.

        Receives come before sends as gloo needs it, whose send ends only once its receive is posted. NCCL needs one
        group call, or the sends and receives of a pair wait for each other.
        """
        if any(x.tensor.device.type != "cpu" for _, x, _ in (*receives, *sends)):
            calls = [(dist.irecv, *message) for message in receives] + [(dist.isend, *message) for message in sends]
            posted = [dist.P2POp(op, x.tensor, peer, group, tag) for op, peer, x, tag in calls]
            return dist.batch_isend_irecv(posted), ()
        arriving, leaving = (
            [op(x.tensor, peer, group=group, tag=tag) for peer, x, tag in messages]
            for op, messages in ((dist.irecv, receives), (dist.isend, sends))
        )
        return [work for work in arriving if work is not None], [work for work in leaving if work is not None]
