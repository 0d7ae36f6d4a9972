"""Snapshots of a training run in memory, written beside the steps that follow.

At a step's end every rank copies what it counts of parameters, buffers and optimizer state. A thread then writes the
copy to shared memory, sends it to the rank that keeps it too, and waits until all ranks have done so; only then the
snapshot before is removed. So there is always one whole snapshot of a step that every rank has finished.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hetu_fx.base.torch_private import device_types
from hetu_fx.checkpoint.shard_files import Key, RankShards
from hetu_fx.checkpoint.snapshot_files import Memory
from hetu_fx.checkpoint.snapshot_plan import Moment, SnapshotPart, holders
from hetu_fx.cluster.measure import node_name
from hetu_fx.comm_ops.wire.consensus import from_first, of_all
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded
from hetu_fx.comm_ops.wire.p2p import Tag, post, wait_for
from hetu_fx.comm_ops.wire.process_group import create_group
from hetu_fx.comm_ops.wire.shutdown import release_at_exit
from hetu_fx.errors import CheckpointError, EnvironmentProblem

_log = logging.getLogger("hetu_fx.snapshots")


class SnapshotWriter:
    """Writes snapshots of one life of the job. Making one is collective, and so is every `write`.

    Messages have a group of their own, as they are sent beside those of the steps.
    """

    def __init__(self, memory: Memory, table: GroupTable) -> None:
        self.memory, self.rank, self.world, self._table = memory, table.rank, table.size, table
        self.life = from_first(table, secrets.token_hex(8))
        self.holders = holders(of_all(table, node_name()))
        self.last: Moment | None = None  # the newest that is known to be whole
        self._group = _own_group(table, self.life)
        self._aside = table if table.size == 1 else table.beside("snapshots")  # the steps go on while it waits
        self._executor = ThreadPoolExecutor(1, "hetu_fx_snapshots")
        self._pending: Future[None] | None = None
        release_at_exit(self)

    def write(self, step: int, tensors: Iterable[tuple[Key, Tensor]], document: Mapping[str, Any]) -> None:
        """Copy what this rank counts of `tensors` now, and store it meanwhile; the one before is waited for."""
        self.wait()
        moment = Moment(step, self.life, self.world)
        pieces = RankShards.of(tensors, self.rank)
        self._pending = self._executor.submit(self._store, moment, pieces, document)

    def wait(self) -> None:
        """Wait until the snapshot under way, if there is one, is whole or given up. Raises CommError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def release(self) -> None:
        """Let the group go; nothing can be written any more."""
        self._group = None

    def _store(self, moment: Moment, pieces: RankShards, document: Mapping[str, Any]) -> None:
        own = SnapshotPart(moment, self.rank, self.rank)
        failed = _failure_of(lambda: self.memory.write(own, pieces, document))
        if self._fails_anywhere(failed):
            return
        failed = _failure_of(lambda: self._exchange(own))
        if self._fails_anywhere(failed):
            return
        self.memory.keep_only(moment, self.rank)
        self.last = moment

    def _fails_anywhere(self, failure: CheckpointError | None) -> bool:
        """Tell whether some rank cannot store this snapshot; then the one before stays."""
        if failure is not None:
            _log.warning("rank %d: this snapshot is given up: %s", self.rank, failure)
        if self._group is None:
            return failure is not None
        failures = torch.tensor([failure is not None], dtype=torch.int32)
        with guarded("agreement on a snapshot", range(self.world), self._aside):
            dist.all_reduce(failures, group=self._group)
        return bool(failures)

    def _exchange(self, own: SnapshotPart) -> None:
        """Send this rank's part to the rank that keeps a copy, and keep those of others."""
        holder = self.holders[self.rank]
        if self._group is None or holder is None:
            return
        mine = self.memory.bytes_of(own)
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = mine.numel()
        with guarded("copies of snapshots", range(self.world), self._aside):
            dist.all_reduce(sizes, group=self._group)
            sent = post((), [(holder, mine, Tag.SNAPSHOTS)], self._table, self._group)
            failures = [_failure_of(lambda o=owner: self._keep(own.moment, o, int(sizes[o]))) for owner in self._kept()]
            wait_for(sent)
        for failure in filter(None, failures):
            raise failure

    def _kept(self) -> list[int]:
        return [owner for owner, holder in enumerate(self.holders) if holder == self.rank]

    def _keep(self, moment: Moment, owner: int, size: int) -> None:
        """Receive another rank's part."""

        def fill(target: Tensor) -> None:
            wait_for(post([(owner, target, Tag.SNAPSHOTS)], (), self._table, self._group))

        self.memory.receive(SnapshotPart(moment, owner, self.rank), size, fill)


def _failure_of(act: Any) -> CheckpointError | None:
    try:
        act()
    except CheckpointError as error:
        return error
    return None


def _own_group(table: GroupTable, life: str) -> ProcessGroup | None:
    """Create a group of all ranks beside that of the steps; None for one rank."""
    if table.size == 1:
        return None
    if "cpu" not in device_types(table.base):
        raise EnvironmentProblem(
            "snapshots are sent from host memory, which the process group cannot; "
            "call init_process_group('cpu:gloo,cuda:nccl'), or leave that to hetu_fx"
        )
    members = [table.to_global(rank) for rank in range(table.size)]
    with guarded("group creation", range(table.size), table):
        return create_group(members, f"hetu_fx/snapshots/{life}", table.timeout)
