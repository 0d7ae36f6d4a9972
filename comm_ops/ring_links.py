"""Messages of a ring between the ranks of a group: started together, waited for together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.comm_ops.ops.ring_attention_run import Message
from hetu_fx.comm_ops.wire.collectives import to_wire
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded

# Keeps these messages apart from others between the same two ranks.
_TAG = 0x5247_0000


class GroupLinks:
    """Links between `ranks`, whose positions they are in the ring."""

    def __init__(self, ranks: Sequence[int], table: GroupTable) -> None:
        self.ranks, self.table = ranks, table

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start messages; empty ones are left out."""
        leaving = [(peer, tag, to_wire(x, self.table)) for peer, tag, x in sends if x.numel()]
        arriving = [(peer, tag, x, self._host(x)) for peer, tag, x in receives if x.numel()]
        if not leaving and not arriving:
            return _nothing
        with guarded("ring attention", self.ranks, self.table):
            works = self._post(leaving, [(peer, tag, wire) for peer, tag, _, wire in arriving])

        def wait() -> None:
            with guarded("ring attention", self.ranks, self.table):
                for work in works:
                    work.wait()
            for _, _, x, wire in arriving:
                if wire is not x:
                    x.copy_(wire)

        return wait

    def _host(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, device="cpu") if self.table.staged(x.device) else x

    def _post(self, leaving: Sequence[Message], arriving: Sequence[Message]) -> list[dist.Work]:
        """Post every receive before any send: gloo's send ends only once its receive is posted."""
        group = self.table.group(self.ranks)
        calls = [(dist.irecv, message) for message in arriving] + [(dist.isend, message) for message in leaving]
        found = [(op, x, self.table.to_global(self.ranks[peer]), _TAG + tag) for op, (peer, tag, x) in calls]
        if found[0][1].device.type != "cpu":
            # NCCL needs one group call, or sends and receives of a pair wait for each other.
            return list(dist.batch_isend_irecv([dist.P2POp(op, x, peer, group, tag) for op, x, peer, tag in found]))
        works = [op(x, peer, group=group, tag=tag) for op, x, peer, tag in found]
        return [work for work in works if work is not None]


def _nothing() -> None:
    """Wait for nothing."""
