"""What `model.hetu.snapshots` gives: snapshots in memory every few steps, and going on from them after a restart.

At a step's end every rank copies what it counts of parameters, buffers and optimizer state. A thread then writes the
copy to shared memory, sends it to the rank that keeps it too, and waits until all ranks have done so; only then the
snapshot before is removed. So there is always one whole snapshot of a step that every rank has finished. A restarted
job finds the newest one, and brings it to where it is needed. Storing one overlaps the next steps, unless it is waited
for.
"""

from __future__ import annotations

import base64
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.base.device_types import device_types
from hetu_fx.base.torch_private import device_types as group_device_types
from hetu_fx.checkpoint import joining
from hetu_fx.checkpoint.checkpoint import checkpoint_tensors, load_model, saved_step
from hetu_fx.checkpoint.folders import latest
from hetu_fx.checkpoint.job_ends import watch_each_other
from hetu_fx.checkpoint.optimizer_files import RestoredTraining, TrainingFiles, state_tensors, training_document
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
from hetu_fx.checkpoint.tensor_files import Bounds, BoxFiles, Key, RankShards, whole_tensor
from hetu_fx.cluster.host import node_name
from hetu_fx.comm_ops.wire.consensus import StepFacts, all_gather_object, from_first, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded, using
from hetu_fx.comm_ops.wire.p2p import Tag, post
from hetu_fx.errors import CheckpointError, EnvironmentProblem, StateError
from hetu_fx.switching.home.layout import meeting
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.runtime import Runtime

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
        self.seconds = 0.0  # that storing the last one took
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
        begin = time.perf_counter()
        self._store_parts(moment, pieces, document)
        self.seconds = time.perf_counter() - begin

    def _store_parts(self, moment: SnapshotMoment, pieces: RankShards, document: Mapping[str, Any]) -> None:
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
    if "cpu" not in group_device_types(table.base):
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


STOPPED_SECONDS = 30.0
CHEAP_SHARE = 0.05  # of the time between two snapshots: what waiting for one may cost

Wait = bool | Literal["cheap"]


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        source: "memory", "checkpoint", or "start" where there was nothing to go on from.
        step: training steps (forward passes) that the state has seen.
        extra: what was given with the snapshot, or saved with the checkpoint.
    """

    source: Literal["memory", "checkpoint", "start"]
    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)


class Snapshots:
    """Keeps the newest finished step of a run in memory; see `Handle.snapshots`.

    A context manager: `close` is called where the block ends without an error.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 1,
        folder: Path | None = None,
        checkpoints: Path | None = None,
        wait: Wait = "cheap",
        stopped_after: float | None = STOPPED_SECONDS,
    ) -> None:
        if every < 1:
            raise StateError(f"snapshots every {every} steps cannot be; every=1 takes one after each")
        if wait not in (True, False, "cheap"):
            raise StateError(f"wait={wait!r} is not known; True, False and 'cheap' are")
        self._runtime, self._optimizer, self.every, self.checkpoints = runtime, optimizer, every, checkpoints
        self._wait, self._last_time = wait, time.perf_counter()
        table = runtime.table
        self._memory = raise_on_all_ranks(table, lambda: SnapshotMemory.at(folder))
        raise_on_all_ranks(table, self._memory.remove_unfinished)
        self._writer = SnapshotWriter(self._memory, table)
        self._finished = 0
        self._watch = watch_each_other(table, stopped_after)
        self._is_joined = False  # the same on all ranks

    @property
    def last_step(self) -> int | None:
        """Return the step of the newest snapshot that is known to be whole."""
        return None if self._writer.last is None else self._writer.last.step

    def step(self, extra: Mapping[str, Any] | None = None) -> None:
        """Tell that a step is finished, optimizer and schedulers included; every k-th call takes a snapshot.

        Collective. `extra` is any JSON object: what else a run needs to go on, such as its position in the data.
        Returns when the snapshot is whole, if it is waited for, else when the state is copied. Where `hetu-fx launch`
        has processes that wait to join, or are to leave, a snapshot is taken and waited for, and the script is run
        again with others.

        Raises:
            CommError: storing the snapshot before failed, as a process is gone.
            Joining: a SystemExit, for the launcher.
        """
        self._finished += 1
        if self._finished % self.every and not self._is_joined:
            return
        runtime = self._runtime
        runtime.in_flight.settle()
        with using(runtime.table):
            runtime.buffers.sync()
        self._writer.write(runtime.step, self._tensors(), self._document(extra or {}))
        if self._is_joined:
            self._let_join()
        if self._is_waited_for():
            self.wait()
        self._last_time = time.perf_counter()

    def _is_waited_for(self) -> bool:
        """Tell whether this rank waits for a snapshot. Each decides for itself: one that is whole is whole for all."""
        if self._wait == "cheap":
            return self._writer.seconds <= CHEAP_SHARE * (time.perf_counter() - self._last_time)
        return self._wait

    def wait(self) -> None:
        """Wait until the snapshot under way is whole (or given up, with a warning)."""
        self._writer.wait()

    def close(self) -> None:
        """Free the memory: the run is finished on all processes, and nothing will be gone on from. Collective."""
        self.wait()
        raise_on_all_ranks(self._runtime.table, lambda: None)
        if self._watch is not None:
            self._watch.close()
        self._memory.remove(self._runtime.table.rank)

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()

    def resume(self) -> ResumePoint:
        """Put the newest whole snapshot, or the last checkpoint if that is of a later step, into model and optimizer.

        Collective. A job of the same name may have left a snapshot long ago, and gone on elsewhere since. Any number of
        processes under any plan reads what any other wrote. Random numbers of torch go on as they were if the number
        of processes is the same.

        Raises:
            CheckpointError: on every process, if there is something to go on from that does not fit.
        """
        table = self._runtime.table
        self._runtime.in_flight.settle()
        with using(table):
            choice, found = find_snapshot(self._memory, table, checkpoint_tensors(self._runtime))
            newest, step = from_first(table, raise_on_all_ranks(table, self._last_checkpoint))
            if found is not None and (newest is None or found.moment.step >= step):
                training = raise_on_all_ranks(table, lambda: self._check(found))
                return raise_on_all_ranks(table, lambda: self._put(found, training))
        return self._from_checkpoint(choice, newest)

    def tell(self) -> dict[str, float]:
        """Say whether this process knows of others that are ready to join, or is to leave."""
        return {"is_joined": joining.asked.is_set()}

    def observe(self, facts: StepFacts) -> None:
        """Learn whether any process does."""
        self._is_joined |= facts.is_joined

    def _let_join(self) -> None:
        """End the script if this step can be gone on from; else the next one's end is tried."""
        self.wait()
        if self.last_step == self._runtime.step:
            raise joining.Joining(f"processes join or leave after step {self.last_step}")

    def _tensors(self) -> Iterator[tuple[Key, Tensor]]:
        for name, tensor in checkpoint_tensors(self._runtime).items():
            yield whole_tensor(name), tensor
        yield from state_tensors(self._optimizer, self._runtime.homes)

    def _document(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        runtime = self._runtime
        return {
            "tensors": _described(checkpoint_tensors(runtime)),
            "training": training_document(self._optimizer, runtime.homes, extra),
            "step": runtime.step,
            "guess": runtime.guess.value,
            "random": _random_states(),
        }

    def _check(self, found: FoundSnapshot) -> RestoredTraining:
        """Read all of a snapshot, which must fit; nothing is changed."""
        document, tensors = found.documents[0], checkpoint_tensors(self._runtime)
        differing = sorted(set(_described(tensors).items()) ^ set(document["tensors"].items()))
        if differing:
            raise CheckpointError(
                f"the snapshot in {self._memory.folder} is of another model, which differs in {differing[:8]}"
                f"\nhint: give another folder, or remove it"
            )
        for name, tensor in tensors.items():
            found.boxes.check(whole_tensor(name), tensor)
        return TrainingFiles(document["training"], found.boxes).read(self._optimizer, self._runtime.homes)

    def _put(self, found: FoundSnapshot, training: RestoredTraining) -> ResumePoint:
        runtime, document = self._runtime, found.documents[0]
        with torch.no_grad():
            for name, tensor in checkpoint_tensors(runtime).items():
                found.boxes.fill(whole_tensor(name), tensor)
        extra = training.put(self._optimizer)
        runtime.resume(int(document["step"]), float(document["guess"]))
        if found.moment.world == runtime.table.size:
            _set_random_states(found.documents[runtime.table.rank]["random"])
        return ResumePoint("memory", runtime.step, extra)

    def _last_checkpoint(self) -> tuple[Path | None, int]:
        """Return the last checkpoint, and the step that it was saved after; 0 where that cannot be read."""
        newest = None if self.checkpoints is None else latest(self.checkpoints)
        try:
            return newest, 0 if newest is None else saved_step(newest)
        except CheckpointError:  # told where it is to be loaded
            return newest, 0

    def _from_checkpoint(self, choice: SnapshotChoice, newest: Path | None) -> ResumePoint:
        for moment, owners in choice.lost:
            _log.warning(
                "the snapshot of step %d is lost: the parts of ranks %s of %d are in no memory; resuming from %s",
                moment.step, list(owners), moment.world, newest or "the start",
            )  # fmt: skip
        if newest is None:
            return ResumePoint("start", self._runtime.step)
        extra = load_model(self._runtime, newest, optimizer=self._optimizer)
        return ResumePoint("checkpoint", self._runtime.step, extra)


def _described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}


def _random_states() -> dict[str, str]:
    """Return torch's generators' states as text, by type of device."""
    found = {kind.name: kind.random_state() for kind in device_types()}
    states = {name: state for name, state in found.items() if state is not None}
    return {device: base64.b64encode(state.numpy().tobytes()).decode() for device, state in states.items()}


def _set_random_states(states: Mapping[str, str]) -> None:
    known = {kind.name: kind for kind in device_types()}
    for device, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if device in known:  # a rank may go on with another type of devices
            known[device].set_random_state(state)
