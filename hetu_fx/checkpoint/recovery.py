"""A restarted job finds the newest snapshot that is whole, in the memory of its nodes, and brings it to where it is
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hetu_fx.checkpoint.shard_files import Bounds, BoxFiles, meeting
from hetu_fx.checkpoint.snapshot_files import Header, Memory
from hetu_fx.checkpoint.snapshot_plan import Moment, PartTransfer, SnapshotChoice, SnapshotPart, choose, plan_transfers
from hetu_fx.cluster.measure import node_name
from hetu_fx.comm_ops.wire.consensus import of_all, together
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded
from hetu_fx.comm_ops.wire.p2p import Tag, post, wait_for
from hetu_fx.switching.home.ops import HomeTensor


@dataclass(frozen=True)
class FoundSnapshot:
    """A whole snapshot: the document of each owner, and the files with all boxes that this rank needs."""

    moment: Moment
    documents: tuple[Mapping[str, Any], ...]
    boxes: BoxFiles


def find_snapshot(
    memory: Memory, table: GroupTable, tensors: Mapping[str, Tensor]
) -> tuple[SnapshotChoice, FoundSnapshot | None]:
    """Choose a snapshot, and bring to each node the parts of it that ranks of the node need for `tensors`; collective.

    Raises CheckpointError where a part cannot be read.
    """
    nodes = of_all(table, node_name())
    choice = choose(dict(zip(nodes, of_all(table, memory.parts()), strict=True)))
    moment = choice.moment
    if moment is None:
        return choice, None
    headers = _headers(memory, table, moment, choice, nodes)
    boxes = {name: _boxes_of(tensor) for name, tensor in tensors.items()}
    needs = [owner for owner, header in enumerate(headers) if _meets(header, boxes)]
    transfers = plan_transfers(choice, nodes, of_all(table, needs))
    sizes = [header.size for header in headers]
    # Together, as other ranks of a node use what its first one receives.
    together(table, lambda: _carry_out(transfers, memory, table, moment, sizes))
    local = _local(memory, moment)
    files = together(table, lambda: BoxFiles([memory.path(local[owner]) for owner in needs], memory.folder))
    return choice, FoundSnapshot(moment, tuple(header.document for header in headers), files)


def _local(memory: Memory, moment: Moment) -> dict[int, SnapshotPart]:
    """Return one part here of each owner at a moment."""
    return {part.owner: part for part in memory.parts() if part.moment == moment}


def _headers(
    memory: Memory, table: GroupTable, moment: Moment, choice: SnapshotChoice, nodes: Sequence[str]
) -> list[Header]:
    """Read each part's header on the first rank of the first node that has it, and tell all ranks."""
    node = nodes[table.rank]

    def read() -> dict[int, Header]:
        if nodes.index(node) != table.rank:
            return {}
        local = _local(memory, moment)
        return {owner: memory.header(local[owner]) for owner, where in enumerate(choice.nodes) if where[0] == node}

    told = of_all(table, together(table, read))
    everything = {owner: header for headers in told for owner, header in headers.items()}
    return [everything[owner] for owner in range(moment.world)]


def _boxes_of(tensor: Tensor) -> tuple[Bounds, ...]:
    if isinstance(tensor, HomeTensor):
        return tuple(box.bounds for box in tensor.home_layout.boxes)
    return (tuple((0, size) for size in tensor.shape),)


def _meets(header: Header, wanted: Mapping[str, Iterable[Bounds]]) -> bool:
    """Tell whether a part has something that is wanted; of state with other dims than its parameter, all is."""
    return any(
        len(box) != len(bounds) or meeting(box, bounds) is not None
        for (name, _), bounds in header.boxes
        for box in wanted.get(name, ())
    )


def _carry_out(
    transfers: Iterable[PartTransfer], memory: Memory, table: GroupTable, moment: Moment, sizes: Sequence[int]
) -> None:
    """Send and receive what this rank has a part in, in the order that all ranks keep."""
    for transfer in transfers:
        with guarded("bringing a snapshot", (transfer.sender, transfer.receiver), table):
            if table.rank == transfer.sender:
                part = _local(memory, moment)[transfer.owner]
                wait_for(post((), [(transfer.receiver, memory.bytes_of(part), Tag.SNAPSHOTS)], table))
            elif table.rank == transfer.receiver:
                _receive(
                    transfer, memory, table, SnapshotPart(moment, transfer.owner, transfer.owner), sizes[transfer.owner]
                )


def _receive(transfer: PartTransfer, memory: Memory, table: GroupTable, part: SnapshotPart, size: int) -> None:
    def fill(target: Tensor) -> None:
        wait_for(post([(transfer.sender, target, Tag.SNAPSHOTS)], (), table))

    memory.receive(part, size, fill)
