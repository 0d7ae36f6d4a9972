"""The one place that posts point-to-point messages, and the table of their tags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch.distributed as dist
from torch import Tensor

from hetu_fx.comm_ops.wire.groups import GroupTable

Message = tuple[int, Tensor, int]
"""The logical rank that a tensor goes to or comes from, the tensor, and a tag."""


class Tag(IntEnum):
    """Keeps messages of different purposes apart that are under way between the same two ranks.

    Where several of one purpose are, a number is added: that of a bucket, or of a step of the ring.
    """

    SLICES = 0x4253  # batched send-receive
    STAGES = 0x4846  # from one stage of a pipeline to another
    SNAPSHOTS = 0x534E  # copies of state in the memory of others
    SUMMANDS = 0x5752  # of a sum that is waited for at once
    BUCKETS = 0x425200  # summands of a bucket of the bridge
    RING = 0x5247_0000  # keys, values and their gradients


def post(
    receives: Sequence[Message], sends: Sequence[Message], table: GroupTable, group: dist.ProcessGroup | None = None
) -> list[dist.Work]:
    """Start messages in `group` (None: that of all ranks); all receives before any send, each kind in the given order.

    So gloo needs it, whose send ends only once its receive is posted. NCCL needs one group call, or the sends and
    receives of a pair wait for each other.
    """
    group = group or table.base
    calls = [(dist.irecv, *message) for message in receives] + [(dist.isend, *message) for message in sends]
    if any(x.device.type != "cpu" for _, _, x, _ in calls):
        batch = [dist.P2POp(op, x, table.to_global(peer), group, tag) for op, peer, x, tag in calls]
        return list(dist.batch_isend_irecv(batch))
    works = [op(x, table.to_global(peer), group=group, tag=tag) for op, peer, x, tag in calls]
    return [work for work in works if work is not None]


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait until messages are gone, or there."""
    for work in works:
        work.wait()
