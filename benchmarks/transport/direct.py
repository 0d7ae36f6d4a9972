"""Messages between devices of the tests' type that leave from where they are, as over links of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.transport import Group, ProcessTransport, Work, WorldMessage
from tests.kinds.testkind import NAME, on_host


class DirectTransport(ProcessTransport):
    """Gloo reads and writes the memory of such devices, which it could not without being told that it is the host's."""

    def is_native(self, group: Group, device: torch.device) -> bool:
        """Say yes for them."""
        return device.type == NAME or super().is_native(group, device)

    def all_reduce(
        self, x: Flat, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, is_async: bool = False
    ) -> Work | None:
        """Do what the host does, as all of them."""
        return super().all_reduce(_there(x), group, op, is_async=is_async)

    def all_gather(self, parts: list[Flat], x: Flat, group: Group, *, is_async: bool = False) -> Work | None:
        """Gather."""
        return super().all_gather(list(map(_there, parts)), _there(x), group, is_async=is_async)

    def reduce_scatter(self, result: Flat, parts: list[Flat], group: Group, *, is_async: bool = False) -> Work | None:
        """Sum and scatter by messages, at once, as gloo's own takes several times as long."""
        ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
        arriving = [(rank, Flat(torch.empty_like(on_host(result.tensor))), 0) for rank in ranks if rank != ranks[own]]
        leaving = [(rank, part, 0) for rank, part in zip(ranks, parts, strict=True) if rank != ranks[own]]
        for works in self.post(arriving, leaving, group):
            for work in works:
                work.wait()
        on_host(result.tensor).copy_(sum((x.tensor for _, x, _ in arriving), on_host(parts[own].tensor)))
        return None

    def post(
        self, receives: Sequence[WorldMessage], sends: Sequence[WorldMessage], group: Group
    ) -> tuple[Sequence[Work], Sequence[Work]]:
        """Start messages."""
        arriving, leaving = ([(peer, _there(x), tag) for peer, x, tag in messages] for messages in (receives, sends))
        return super().post(arriving, leaving, group)


def _there(buffer: Flat) -> Flat:
    return Flat(on_host(buffer.tensor))
