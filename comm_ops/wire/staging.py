"""Messages between ranks whose devices are of unlike types: through the host, in chunks that overlap.

What leaves a device is copied to the host, sent, and copied to the device at the other end. In chunks, the wire
carries one while the next is copied, so that the whole takes as long as the slower of the two, not as long as all
three. Both ends cut a message alike: whether it is cut follows from who the ends are, and where from its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetu_fx.base.device_types import HOST, device_type_record
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.transport import Work

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
