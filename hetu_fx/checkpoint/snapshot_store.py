"""Snapshots of a training run in the memory of its nodes: written beside the steps that follow, found after a restart.

At a step's end every rank copies what it counts of parameters, buffers and optimizer state. A thread then writes the
copy to shared memory, sends it to the rank that keeps it too, and waits until all ranks have done so; only then the
snapshot before is removed. So there is always one whole snapshot of a step that every rank has finished. A restarted
job finds the newest one, and brings it to where it is needed.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.base.torch_private import device_types
from hetu_fx.checkpoint.snapshot_files import (
    Header,
    PartTransfer,
    SnapshotChoice,
    SnapshotMemory,
    SnapshotMoment,
    SnapshotPart,
    choose,
    holders,
    plan_transfers,
)
from hetu_fx.checkpoint.tensor_files import Bounds, BoxFiles, Key, RankShards
from hetu_fx.cluster.host import node_name
from hetu_fx.comm_ops.wire.consensus import all_gather_object, from_first, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded
from hetu_fx.comm_ops.wire.p2p import Tag, post
from hetu_fx.errors import CheckpointError, EnvironmentProblem
from hetu_fx.switching.home.layout import meeting
from hetu_fx.switching.home.ops import HomeTensor

_log = logging.getLogger("hetu_fx.snapshots")


class SnapshotWriter:
    """Writes snapshots of one life of the job. Making one is collective, and so is every `write`.

    Messages have a group of their own, as they are sent beside those of the steps.
    """

    def __init__(self, memory: SnapshotMemory, table: GroupTable) -> None:
        self.memory, self.rank, self.world = memory, table.rank, table.size
        self.life = from_first(table, secrets.token_hex(8))
        self.holders = holders(all_gather_object(table, node_name()))
        self.last: SnapshotMoment | None = None  # the newest that is known to be whole
        self._is_failing = False
        self._aside = _own_table(table, self.life)
        self._executor = ThreadPoolExecutor(1, "hetu_fx_snapshots")
        self._pending: Future[None] | None = None

    def write(self, step: int, tensors: Iterable[tuple[Key, Tensor]], document: Mapping[str, Any]) -> None:
        """Copy what this rank counts of `tensors` now, and store it meanwhile; the one before is waited for."""
        self.wait()
        moment = SnapshotMoment(step, self.life, self.world)
        pieces = RankShards.of(tensors, self.rank)
        self._pending = self._executor.submit(self._store, moment, pieces, document)

    def wait(self) -> None:
        """Wait until the snapshot under way, if there is one, is whole or given up. Raises CommError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _store(self, moment: SnapshotMoment, pieces: RankShards, document: Mapping[str, Any]) -> None:
        own = SnapshotPart(moment, self.rank, self.rank)
        sizes = self._of_all(lambda: self.memory.write(own, pieces, document))
        if sizes is None or not self._exchange(own, sizes):
            self.memory.discard_part(moment, self.rank)  # the one before stays, and may need the room
            return
        self.memory.keep_only(moment, self.rank)
        if self._is_failing:
            _log.warning("rank %d: snapshots are taken again, from step %d on", self.rank, moment.step)
        self.last, self._is_failing = moment, False

    def _exchange(self, own: SnapshotPart, sizes: Sequence[int]) -> bool:
        """Send this rank's part to the rank that keeps a copy, and keep those of others; tell whether all could."""
        holder = self.holders[self.rank]
        if holder is None:
            return True
        kept = [SnapshotPart(own.moment, owner, self.rank) for owner, at in enumerate(self.holders) if at == self.rank]
        rooms = dict[SnapshotPart, Tensor]()

        def make_room() -> int:
            rooms.update({part: self.memory.allocate_part(part, sizes[part.owner]) for part in kept})
            return len(rooms)

        def keep() -> int:
            for part in kept:
                self.memory.mark_arrived(part)
            return len(kept)

        if self._of_all(make_room) is None:  # before anything is sent: who sends waits for who receives
            return False
        with guarded("copies of snapshots", range(self.world), self._aside):
            arriving = [(part.owner, room, Tag.SNAPSHOTS) for part, room in rooms.items()]
            post(arriving, [(holder, self.memory.bytes_of(own), Tag.SNAPSHOTS)], self._aside).wait()
        return self._of_all(keep) is not None

    def _of_all(self, act: Callable[[], int]) -> list[int] | None:
        """Do something local on every rank; return the numbers that it gives, of 0 or more. None where one fails."""
        numbers = torch.zeros(self.world, dtype=torch.int64)
        try:
            numbers[self.rank] = act()
        except CheckpointError as error:
            numbers[self.rank] = -1
            level = logging.DEBUG if self._is_failing else logging.WARNING  # told once, not after each step
            _log.log(level, "rank %d: this snapshot is given up: %s", self.rank, error)
            self._is_failing = True
        if self.world > 1:
            with guarded("agreement on a snapshot", range(self.world), self._aside):
                dist.all_reduce(numbers, group=self._aside.base)
        found: list[int] = numbers.tolist()
        return None if min(found) < 0 else found


def _own_table(table: GroupTable, life: str) -> GroupTable:
    """Return the table of all ranks with a group beside those of the steps and of other writers; collective."""
    if table.size == 1:
        return table
    if "cpu" not in device_types(table.base):
        raise EnvironmentProblem(
            "snapshots are sent from host memory, which the process group cannot"
            "\nhint: call init_process_group('cpu:gloo,cuda:nccl'), or leave that to hetu_fx"
        )
    return table.beside(f"snapshots {life}", is_whole=True)


@dataclass(frozen=True)
class FoundSnapshot:
    """A whole snapshot: the document of each owner, and the files with all boxes that this rank needs."""

    moment: SnapshotMoment
    documents: tuple[Mapping[str, Any], ...]
    boxes: BoxFiles


def find_snapshot(
    memory: SnapshotMemory, table: GroupTable, tensors: Mapping[str, Tensor]
) -> tuple[SnapshotChoice, FoundSnapshot | None]:
    """Choose a snapshot, and bring to each node the parts of it that ranks of the node need for `tensors`; collective.

    Raises CheckpointError where a part cannot be read.
    """
    nodes = all_gather_object(table, node_name())
    node = nodes[table.rank]
    is_first = nodes.index(node) == table.rank
    told = all_gather_object(table, raise_on_all_ranks(table, lambda: memory.sound_parts() if is_first else ()))
    found = {name: told[nodes.index(name)] for name in nodes}
    choice = choose(found)
    moment = choice.moment
    if moment is None:
        return choice, None
    local = {part.owner: part for part in found[node] if part.moment == moment}
    mine = [owner for owner, where in enumerate(choice.nodes) if is_first and where[0] == node]
    headers = _headers(memory, table, local, mine)
    boxes = {name: _boxes_of(tensor) for name, tensor in tensors.items()}
    needs = [owner for owner, header in enumerate(headers) if _meets(header, boxes)]
    transfers = plan_transfers(choice, nodes, all_gather_object(table, needs))
    local |= {t.owner: SnapshotPart(moment, t.owner, t.owner) for t in transfers if nodes[t.receiver] == node}
    arriving = [local[t.owner] for t in transfers if t.receiver == table.rank]
    rooms = raise_on_all_ranks(
        table, lambda: {part: memory.allocate_part(part, headers[part.owner].size) for part in arriving}
    )
    # Together, as other ranks of a node use what its first one receives.
    raise_on_all_ranks(table, lambda: _carry_out(transfers, memory, table, local, rooms))
    files = raise_on_all_ranks(table, lambda: BoxFiles([memory.open(local[owner]) for owner in needs], memory.folder))
    return choice, FoundSnapshot(moment, tuple(header.document for header in headers), files)


def _headers(
    memory: SnapshotMemory, table: GroupTable, local: Mapping[int, SnapshotPart], mine: Iterable[int]
) -> list[Header]:
    """Read the headers of the parts of some owners here, and tell all ranks; together they have those of all owners."""
    told = all_gather_object(
        table, raise_on_all_ranks(table, lambda: {owner: memory.header(local[owner]) for owner in mine})
    )
    everything = {owner: header for headers in told for owner, header in headers.items()}
    return [everything[owner] for owner in sorted(everything)]


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
    transfers: Iterable[PartTransfer],
    memory: SnapshotMemory,
    table: GroupTable,
    local: Mapping[int, SnapshotPart],
    rooms: Mapping[SnapshotPart, Tensor],
) -> None:
    """Send and receive what this rank has a part in, in the order that all ranks keep."""
    for transfer in transfers:
        owner = transfer.owner
        with guarded("bringing a snapshot", (transfer.sender, transfer.receiver), table):
            if table.rank == transfer.sender:
                post((), [(transfer.receiver, memory.bytes_of(local[owner]), Tag.SNAPSHOTS)], table).wait()
            elif table.rank == transfer.receiver:
                post([(transfer.sender, rooms[local[owner]], Tag.SNAPSHOTS)], (), table).wait()
                memory.mark_arrived(local[owner])
