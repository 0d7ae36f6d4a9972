"""The one place that posts point-to-point messages, and the table of their tags.

Between ranks whose devices are of unlike types they go through the host, in chunks that overlap.

Messages between ranks whose devices are of unlike types: through the host, in chunks that overlap. What leaves a device
is copied to the host, sent, and copied to the device at the other end. In chunks, the wire carries one while the next
is copied, so that the whole takes as long as the slower of the two, not as long as all three. Both ends cut a message
alike: whether it is cut follows from who the ends are, and where from its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby, starmap

import torch
from torch import Tensor

from hetu_fx.base.device_types import HOST, device_type_record
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.transport import Group, Work

CHUNK_BYTES, LEAST_CHUNK_BYTES = 1 << 20, 1 << 18
CHUNKS = 16
"""Of a staged message; its first and last chunk overlap with nothing, and each costs a message.

So a message is cut in CHUNKS, or fewer that are no smaller than the least, or more that are no larger than the most.
"""


@dataclass(frozen=True)
class StagedMessage:
    """A message that is cut in chunks on the host.

    Attributes:
        value: the bytes of what is sent or filled; on a device, or on the host already.
        host: the same bytes on the host: the value's own memory, or room for a copy.
    """

    value: Tensor
    host: Tensor

    @classmethod
    def of(cls, buffer: Flat) -> StagedMessage:
        """Make room on the host where the value is not there."""
        flat = buffer.as_bytes()
        if flat.device == HOST:
            return cls(flat, flat)
        pinned = device_type_record(flat.device).pins_host
        return cls(flat, torch.empty(flat.shape, dtype=flat.dtype, pin_memory=pinned))

    def leaving(self) -> Iterator[Tensor]:
        """Bring chunk by chunk to the host, each when it is asked for."""
        for chunk, host in zip(_chunks(self.value), _chunks(self.host), strict=True):
            if self.value is not self.host:
                host.copy_(chunk)
            yield host

    def arriving(self) -> Sequence[Tensor]:
        """Return the room for each chunk."""
        return _chunks(self.host)


@dataclass(frozen=True)
class StagedArrival:
    """Chunks under way to this rank; each goes on to the device while those after it are on the wire."""

    message: StagedMessage
    works: Sequence[Work]

    def wait(self) -> None:
        """Wait until all are where they belong."""
        chunks = zip(self.works, _chunks(self.message.value), _chunks(self.message.host), strict=True)
        for work, chunk, host in chunks:
            work.wait()
            if self.message.value is not self.message.host:
                chunk.copy_(host, non_blocking=host.is_pinned())

    def is_completed(self) -> bool:
        """Tell whether all have come over the wire."""
        return all(work.is_completed() for work in self.works)


def _chunks(flat: Tensor) -> Sequence[Tensor]:
    if not flat.numel():
        return (flat,)
    size = min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, flat.nbytes // CHUNKS))
    chunks: Sequence[Tensor] = flat.split(size // flat.itemsize)
    return chunks


Message = tuple[int, Tensor, int]
"""The logical rank that a tensor goes to or comes from, the tensor, which is dense, and a tag."""
_Buffered = tuple[int, Flat, int]
"""The same, with the tensor as a buffer."""


class Tag(IntEnum):
    """Keeps messages of different purposes apart that are under way between the same two ranks.

    Where several of one purpose are, a number is added: that of a bucket, or of a step of the ring.
    """

    SLICES = 0x4253  # batched send-receive
    STAGES = 0x4846  # from one stage of a pipeline to another
    ROWS = 0x524F  # of a batch, on the way to the pipelines that take them
    SNAPSHOTS = 0x534E  # copies of state in the memory of others
    EXCHANGE = 0x4558  # parts of a tensor that is cut anew
    SUMMANDS = 0x5752  # of a sum that is waited for at once
    TREE = 0x5452  # of a sum of a few numbers of all ranks
    BUCKETS = 0x425200  # summands of a bucket of the bridge
    RING = 0x5247_0000  # keys, values and their gradients


@dataclass(frozen=True, slots=True)
class PendingMessages:
    """Messages under way; where one group call carries all of them, they arrive and leave together.

    Each is waited for once: a second wait for a message of gloo would wait for another one.
    """

    arriving: Sequence[Work]
    leaving: Sequence[Work] = ()

    def arrive(self) -> None:
        """Wait until those to this rank are there. With gloo, a receiver that is busy does not hold this rank up."""
        for work in self.arriving:
            work.wait()

    def leave(self) -> None:
        """Wait until those of this rank are gone."""
        for work in self.leaving:
            work.wait()

    def wait(self) -> None:
        """Wait until all are there, or gone."""
        self.arrive()
        self.leave()


def post(
    receives: Sequence[Message],
    sends: Sequence[Message],
    table: GroupTable,
    group: Group = None,
    *,
    is_staged: bool = False,
) -> PendingMessages:
    """Start messages in `group` (None: that of all ranks); all receives before any send, each kind in the given order.

    What a rank sends and what it waits for next belong in one call. Each goes the way that its two ends have: from
    where it is, all of those in one group call, or through the host; all of them where `is_staged`, which
    both ends say alike; what a step hands over, by `table.mail` where it can. What goes to several ranks, one
    after the other, is brought to the host once.

    Raises:
        CommError: a tensor is not dense.
    """
    arriving, leaving, first = _buffered(receives), _buffered(sends), PendingMessages(())
    if (mail := table.mail) is not None:
        arriving, given = _divided(arriving, mail.takes)
        leaving, handed = _divided(leaving, mail.takes)
        first = PendingMessages([*starmap(mail.receive, given)], [*starmap(mail.send, handed)])
        if not arriving and not leaving:
            return first
    others = _Ways(table, table.base if group is None else group, is_staged).start(arriving, leaving)
    return PendingMessages((*first.arriving, *others.arriving), (*first.leaving, *others.leaving))


def _buffered(messages: Sequence[Message]) -> list[_Buffered]:
    """Return messages with one buffer over each tensor, be it named by several."""
    if not messages:
        return []
    buffers = {id(x): Flat.over(x) for _, x, _ in messages}
    return [(peer, buffers[id(x)], tag) for peer, x, tag in messages]


def _divided(
    messages: Sequence[_Buffered], is_other: Callable[[int, Flat, int], bool]
) -> tuple[list[_Buffered], list[_Buffered]]:
    """Return messages in their order, and apart from them the others."""
    found: tuple[list[_Buffered], list[_Buffered]] = ([], [])
    for message in messages:
        found[is_other(*message)].append(message)
    return found


def _is_on_device(peer: int, x: Flat, tag: int) -> bool:
    return not x.tensor.is_cpu


@dataclass(frozen=True, slots=True)
class _Ways:
    """Posts the messages of one call."""

    table: GroupTable
    group: Group
    is_staged: bool

    def start(self, receives: Sequence[_Buffered], sends: Sequence[_Buffered]) -> PendingMessages:
        """Start messages, each the way that it goes."""
        direct, staged = zip(*(self.split_by_route(messages) for messages in (receives, sends)), strict=True)
        arriving = [self.receive(*message) for message in staged[0]]
        arrives, leaves = self.post(*direct) if any(direct) or not any(staged) else ((), ())
        leaving = [work for _, same in groupby(staged[1], lambda one: id(one[1])) for work in self.send(list(same))]
        return PendingMessages((*arrives, *arriving), (*leaves, *leaving))

    def split_by_route(self, messages: Sequence[_Buffered]) -> tuple[list[_Buffered], list[_Buffered]]:
        """Return those that go from where they are, and those that go through the host, in chunks at both ends."""
        return _divided(messages, self._goes_through_host)

    def _goes_through_host(self, peer: int, x: Flat, tag: int) -> bool:
        return self.is_staged or self.table.is_staged(x.tensor.device, (self.table.rank, peer)) or self.table.cuts(peer)

    def post(self, receives: Sequence[_Buffered], sends: Sequence[_Buffered]) -> tuple[Sequence[Work], Sequence[Work]]:
        """Start messages from where they are: on devices, in the group of those of one type, if there are several."""
        if not self.table.is_mixed:
            return self._post(receives, sends, self.group)
        (here, there), (own, theirs) = (_divided(messages, _is_on_device) for messages in (receives, sends))
        on_host = self._post(here, own, self.group)
        on_device = self._post(there, theirs, self.table.direct) if there or theirs else ((), ())
        return (*on_host[0], *on_device[0]), (*on_host[1], *on_device[1])

    def _post(
        self, receives: Sequence[_Buffered], sends: Sequence[_Buffered], group: Group
    ) -> tuple[Sequence[Work], Sequence[Work]]:
        arrives, leaves = (
            [(self.table.to_global(peer), x, tag) for peer, x, tag in messages] for messages in (receives, sends)
        )
        return self.table.transport.post(arrives, leaves, group)

    def receive(self, peer: int, x: Flat, tag: int) -> Work:
        """Start to receive chunks."""
        message = StagedMessage.of(x)
        arriving, _ = self.post([(peer, Flat(chunk), tag) for chunk in message.arriving()], ())
        return StagedArrival(message, arriving)

    def send(self, messages: Sequence[_Buffered]) -> Iterator[Work]:
        """Start to send one tensor in chunks, each as soon as it is on the host."""
        for chunk in StagedMessage.of(messages[0][1]).leaving():
            yield from self.post((), [(peer, Flat(chunk), tag) for peer, _, tag in messages])[1]
