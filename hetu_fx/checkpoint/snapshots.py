"""What `model.hetu.snapshots` gives: snapshots in memory every few steps, and going on from them after a restart."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hetu_fx.base.device_types import device_types
from hetu_fx.checkpoint import joining
from hetu_fx.checkpoint.checkpoint import checkpoint_tensors, load_model, saved_step
from hetu_fx.checkpoint.folders import latest
from hetu_fx.checkpoint.heartbeats import watch_each_other
from hetu_fx.checkpoint.optimizer_files import RestoredTraining, TrainingFiles, state_tensors, training_document
from hetu_fx.checkpoint.snapshot_files import SnapshotChoice, SnapshotMemory
from hetu_fx.checkpoint.snapshot_store import FoundSnapshot, SnapshotWriter, find_snapshot
from hetu_fx.checkpoint.tensor_files import Key, whole_tensor
from hetu_fx.comm_ops.wire.consensus import StepFacts, from_first, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import using
from hetu_fx.errors import CheckpointError, StateError
from hetu_fx.switching.runtime import Runtime

STOPPED_SECONDS = 30.0

_log = logging.getLogger("hetu_fx.snapshots")


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
        stopped_after: float | None = STOPPED_SECONDS,
    ) -> None:
        if every < 1:
            raise StateError(f"snapshots every {every} steps cannot be; every=1 takes one after each")
        self._runtime, self._optimizer, self.every, self.checkpoints = runtime, optimizer, every, checkpoints
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
        Returns when the state is copied; the rest is done beside the next steps. Where `hetu-fx launch` has processes
        that wait to join, or are to leave, a snapshot is taken and waited for, and the script is run again with others.

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
