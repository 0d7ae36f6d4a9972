"""How a job ends before it is done: it is told to by a signal, or a process of it gives no sign of life.

`model.hetu.save_on_signal`: a job that is told to end writes a checkpoint first, all processes together. One process
that has been told is enough. It says so in the message that processes exchange before every step, the first one after
the optimizer's step; all of them save then, and leave the script.

A process that gives no sign of life is noticed where the launcher does not: torchrun waits for it for ever. Every
process counts up a number in the launcher's store, and reads those of the others on its node and of the next rank. One
that has not counted for so long is ended by those on its node, and all cut their connections, so that all restart.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hetu_fx.base.frameworks import torch_optimizer
from hetu_fx.base.machine import node_name, short_names, start_time
from hetu_fx.base.torch_private import Store
from hetu_fx.checkpoint.checkpoint import save_model
from hetu_fx.comm_ops.wire.common_path import end_communication
from hetu_fx.comm_ops.wire.consensus import StepFacts, all_gather_object, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.rendezvous import launcher_store
from hetu_fx.errors import StateError
from hetu_fx.switching.runtime import Runtime

LEFT = "left"  # the sign of one that has nothing more to do

_job_log = logging.getLogger("hetu_fx.snapshots")


class HeartbeatAges:
    """Seconds for which each of some ranks has given no new sign."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._seconds = dict.fromkeys(ranks, 0.0)
        self._last: dict[int, str] = {}

    def hear(self, signs: Mapping[int, str], seconds: float) -> None:
        """Take in the newest sign of each rank; so much time has passed since the last call."""
        for rank, silent in self._seconds.items():
            is_new = signs.get(rank) != self._last.get(rank) or signs.get(rank) == LEFT
            self._seconds[rank] = 0.0 if is_new else silent + seconds
        self._last = dict(signs)

    def longer_than(self, seconds: float) -> tuple[int, ...]:
        """Return the ranks that have been silent for longer."""
        return tuple(rank for rank, silent in self._seconds.items() if silent > seconds)


def ranks_watched_by(rank: int, nodes: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that a rank watches: the others on its node, and the next one. `nodes`: of all ranks."""
    local = {other for other, node in enumerate(nodes) if node == nodes[rank]}
    return tuple(sorted((local | {(rank + 1) % len(nodes)}) - {rank}))


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank's process.

    Attributes:
        node: that it is on.
        process: its id there.
        started: its start time there (`machine.start_time`), which no other process of this id has.
    """

    node: str
    process: int
    started: int | None

    @classmethod
    def own(cls) -> Peer:
        """Return this process."""
        return cls(node_name(), os.getpid(), start_time(os.getpid()))

    def opened(self) -> int | None:
        """Return a descriptor of the process, if it is seen here: a number may be another process's by then."""
        try:
            found = os.pidfd_open(self.process)
        except ProcessLookupError:
            return None
        if start_time(self.process) == self.started:
            return found
        os.close(found)
        return None


class Heartbeats:
    """Gives signs of life of this rank, and ends communication once another one gives none for `seconds`.

    Args:
        store: with a connection of its own.
        rank: of this process.
        peers: by rank.
        seconds: the bound.
    """

    def __init__(self, store: Store, rank: int, peers: Sequence[Peer], seconds: float) -> None:
        self._store, self._rank, self._peers, self._bound = store, rank, peers, seconds
        self._watched = ranks_watched_by(rank, [peer.node for peer in peers])
        local = {other: peers[other].opened() for other in self._watched if peers[other].node == peers[rank].node}
        self._local = {other: process for other, process in local.items() if process is not None}
        self._silences = HeartbeatAges(self._watched)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="hetu_fx_heartbeats")
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Give no more signs; the others do not wait for any."""
        atexit.unregister(self.close)
        self._over.set()
        self._thread.join(self._bound)
        with suppress(RuntimeError):  # the launcher is gone, and its store
            self._store.set(_key(self._rank), LEFT)
        while self._local:
            os.close(self._local.popitem()[1])

    def _work(self) -> None:
        pause, last = self._bound / 10, time.monotonic()
        while not self._over.wait(pause):
            # Of a time in which this process itself was stopped, it has heard nothing.
            now = time.monotonic()
            passed, last = min(now - last, 2 * pause), now
            try:
                lost = self._exchange(passed)
            except RuntimeError as error:
                _job_log.warning("rank %d: the launcher's store is gone, no rank is watched: %s", self._rank, error)
                return
            if lost:
                self._end(lost)

    def _exchange(self, passed: float) -> tuple[int, ...]:
        """Give a sign, and read those of the others; returns the ranks that somebody has found to be silent."""
        self._store.set(_key(self._rank), str(time.monotonic_ns()))
        signs = {r: self._store.get(_key(r)).decode() for r in self._watched if self._store.check([_key(r)])}
        self._silences.hear(signs, passed)
        if found := self._silences.longer_than(self._bound):
            self._store.set("lost", " ".join(map(str, found)))
        return tuple(map(int, self._store.get("lost").split())) if self._store.check(["lost"]) else ()

    def _end(self, lost: Sequence[int]) -> None:
        """End those that are here, and all communication until this process ends: it may be opening connections."""
        nodes = short_names([peer.node for peer in self._peers])
        named = ", ".join(f"rank {rank} (process {self._peers[rank].process} on {nodes[rank]})" for rank in lost)
        _job_log.warning("%s has given no sign of life for %g s; all ranks must restart", named, self._bound)
        for rank in set(lost) & set(self._local):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._local[rank], signal.SIGKILL)
        end_communication(f"{named} has given no sign of life", self._over)


def _key(rank: int) -> str:
    return f"beat/{rank}"


def watch_each_other(table: GroupTable, seconds: float | None) -> Heartbeats | None:
    """Watch the ranks of a table where torchrun has started them, and no others; None elsewhere. Collective.

    `hetu-fx launch` watches its processes itself. Raises StateError for a bound that cannot be.
    """
    if seconds is not None and seconds <= 0:
        raise StateError(f"stopped_after={seconds:g} must be above 0 seconds\nhint: None turns the watch off")
    is_whole_world = table.size == int(os.environ.get("WORLD_SIZE", "1"))
    if seconds is None or table.size == 1 or not is_whole_world or "HETU_FX_START" in os.environ:
        return None
    peers = all_gather_object(table, Peer.own())
    store = launcher_store()
    return None if store is None else Heartbeats(store, table.rank, peers, seconds)


SAME_SECONDS = 5.0
"""A signal so soon after the first is the same: torchrun passes on what Slurm has sent to all processes already."""

_log = logging.getLogger("hetu_fx.checkpoint")


class SaveOnSignal:
    """Saves and ends the job between two steps once a process has had a signal; see `Handle.save_on_signal`."""

    def __init__(
        self,
        runtime: Runtime,
        folder: Path,
        optimizer: torch.optim.Optimizer,
        *,
        extra: Callable[[], Mapping[str, Any]],
        signals: Iterable[int],
        status: int,
    ) -> None:
        self.runtime, self.folder, self.optimizer = runtime, folder, torch_optimizer(optimizer)
        self.extra, self.status = extra, status
        self._told_at: float | None = None
        self._number = 0
        self._is_between_steps = True
        self._before: dict[int, Any] = {}
        raise_on_all_ranks(runtime.table, lambda: self._listen(tuple(signals)))
        self._hook = self.optimizer.register_step_post_hook(self._stepped)

    def close(self) -> None:
        """Listen no more: signals do what they did before."""
        self.runtime.unwatch(self)
        self._hook.remove()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def tell(self) -> dict[str, float]:
        """Say whether this rank has been told to end, and a step of the optimizer has just been finished."""
        return {"ending": self._trains and self._is_between_steps and self._told_at is not None}

    def observe(self, facts: StepFacts) -> None:
        """Save and leave the script if a rank says so; else the next step has begun.

        Raises:
            SystemExit: with the status that was asked for.
            CheckpointError: on every rank, if it cannot be written.
        """
        if facts.ending:
            self._save(facts.ending)
        self._is_between_steps = self._is_between_steps and not self._trains

    def _save(self, told: tuple[int, ...]) -> None:
        save_model(self.runtime, self.folder, optimizer=self.optimizer, extra=self.extra())
        if self.runtime.table.rank == 0:
            _log.warning("ranks %s got the signal to end: step %d is saved in %s", told, self.runtime.step, self.folder)
        before = self._before.get(self._number)
        self.close()
        if self._told_at is not None and callable(before) and before is not signal.default_int_handler:
            before(self._number, None)
        raise SystemExit(self.status)

    @property
    def _trains(self) -> bool:
        return self.runtime.model.training and torch.is_grad_enabled()

    def _stepped(self, *_: object) -> None:
        self._is_between_steps = True

    def _listen(self, signals: tuple[int, ...]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise StateError("save_on_signal must be called in the main thread, as signals arrive there")
        for number in signals:
            before = signal.signal(number, self._noted)
            self._before[number] = signal.SIG_DFL if before is None else before

    def _noted(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._told_at is None:
            self._told_at, self._number = now, number
        elif now - self._told_at > SAME_SECONDS:
            self.close()
            os.kill(os.getpid(), number)
