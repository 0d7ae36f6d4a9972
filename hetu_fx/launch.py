"""`hetu-fx launch`: starts a script in several processes, and lets the others go on when one is lost.

A worker's end is noticed at once; one that is stopped gives no sign of life, and is ended.
The others are told, so that whoever waits for a message gets an error; they leave their groups, are numbered anew, and
run the script again in the same processes. Workers are forks of the launcher, which has imported what takes seconds.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from hetu_fx.launch_channel import Channel, Message
from hetu_fx.launch_spec import LaunchSpec, Worker, signal_name, spelled
from hetu_fx.launch_store import StoreProcess

GAVE_UP_STATUS = 70
TERMINATE_SECONDS = 5.0


@dataclass(slots=True)
class Launcher:
    """Runs one job; `run` reads top to bottom. `work` is what a worker does; it returns the exit status."""

    spec: LaunchSpec
    work: Callable[[LaunchSpec, Channel], int]
    workers: list[Worker] = field(default_factory=list)
    start: int = 0  # how often the script has been started
    losses: int = 0
    failed_at: float | None = None  # when the run under way failed; None while it goes well
    status: int | None = None
    store: StoreProcess | None = None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _events: IO[str] | None = None

    def run(self) -> int:
        """Run the job to its end; returns the exit status."""
        self._events = None if self.spec.events is None else self.spec.events.open("a", buffering=1)
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            while self.status is None:
                self._fill_up()
                self._begin_if_ready()
                self._handle_events()
                self._judge()
            return self.status
        finally:
            self._end_all()

    # What happens.

    def _handle_events(self) -> None:
        for key, _ in self._selector.select(timeout=self.spec.beat_seconds):
            worker: Worker = key.data
            seen, is_end = time.monotonic(), key.fileobj == worker.end
            for message in worker.channel.receive() or ():
                self._told(worker, message)
            if is_end:
                self._forget(worker)
                self._ended(worker, seen)

    def _told(self, worker: Worker, message: Message) -> None:
        worker.last_sign = time.monotonic()
        match message["kind"]:
            case "beat" if "waits_for" in message:
                worker.wait = message["waits_for"], message["seconds"]
            case "beat":
                worker.wait = None
            case "ready":
                worker.state = "idle"
            case "stopped":
                worker.state = "idle"
                self._say("stopped", worker=worker.process, rank=worker.rank, reason=message["reason"])
                self._fail(f"{worker.name} stopped: {message['reason']}")
            case "done":
                worker.state = "done"
                if all(w.state == "done" for w in self._members()):
                    self.status = 0

    def _forget(self, worker: Worker) -> None:
        self.workers.remove(worker)
        for source in (worker.end, worker.channel.socket):
            self._selector.unregister(source)
        os.close(worker.end)
        worker.channel.socket.close()

    def _ended(self, worker: Worker, seen: float) -> None:
        """Judge why a process has ended: by its own error, or lost."""
        code = os.waitstatus_to_exitcode(os.waitpid(worker.process, 0)[1])
        state, worker.state = worker.state, "gone"
        if code > 0 and not worker.verdict:
            self.status = code
            print(f"hetu-fx launch: {worker.name} ended with status {code}", file=sys.stderr)
            return
        by = signal_name(-code) if code < 0 else "itself"
        reason = worker.verdict or f"{worker.name} was ended by {by}"
        self.losses += 1
        self._say("lost", worker=worker.process, rank=worker.rank, reason=reason, at=seen)
        if self.losses > self.spec.max_losses:
            print(f"hetu-fx launch: {self.losses} workers are lost, the last: {reason}", file=sys.stderr)
            self.status = GAVE_UP_STATUS
        elif state in ("running", "done"):
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        """Tell all others that this run is over."""
        if self.failed_at is not None:
            return
        self.failed_at = time.monotonic()
        print(f"hetu-fx launch: {reason}; the others go on", file=sys.stderr)
        for worker in self._members():
            worker.channel.send("lost", reason=reason)
            if worker.state == "done":
                worker.state = "idle"

    # What is decided.

    def _judge(self) -> None:
        """End workers that are stopped, stuck, or do not leave their groups."""
        now, running = time.monotonic(), [w for w in self.workers if w.state in ("running", "done")]
        for worker in self.workers:
            silent = now - worker.last_sign
            if worker.state != "starting" and silent > self.spec.stopped_seconds:
                self._end(worker, f"{worker.name} has given no sign of life for {silent:.1f} s{spelled(worker.wait)}")
        if self.failed_at is not None and now - self.failed_at > self.spec.grace_seconds:
            for worker in running:
                self._end(worker, f"{worker.name} did not leave its groups{spelled(worker.wait)}")
        stuck = [w for w in running if w.wait is not None and w.wait[1] > self.spec.stuck_seconds]
        if stuck and self.failed_at is None:
            others = [w for w in running if w.wait is None or w.wait[1] < self.spec.stuck_seconds / 2]
            for worker in others or stuck:
                self._end(worker, f"{stuck[0].name}{spelled(stuck[0].wait)}, and {worker.name} does not come")

    def _end(self, worker: Worker, verdict: str) -> None:
        if not worker.verdict:
            worker.verdict = verdict
            worker.signal(signal.SIGKILL)

    def _fill_up(self) -> None:
        """Start processes: all at first, and others where too few are left."""
        if self.start == 0 or len(self.workers) < self.spec.min_nproc:
            for _ in range(self.spec.nproc - len(self.workers)):
                self._start_worker()

    def _begin_if_ready(self) -> None:
        """Start the script once nobody runs it and enough processes are ready."""
        if any(w.state in ("running", "done") for w in self.workers) or (self.start and self.failed_at is None):
            return
        idle = sorted((w for w in self.workers if w.state == "idle"), key=lambda w: (w.rank < 0, w.rank))
        enough = self.spec.min_nproc if self.start else self.spec.nproc
        if len(idle) < enough:
            return
        self._begin(idle[: self.spec.nproc])

    def _begin(self, members: Sequence[Worker]) -> None:
        world, self.failed_at = len(members), None
        port = self._new_store().port
        for worker in self.workers:
            worker.rank = -1
        for rank, worker in enumerate(members):
            worker.rank, worker.state, worker.wait = rank, "running", None
            environment = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HETU_FX_START": self.start,
                "TORCHELASTIC_USE_AGENT_STORE": True,  # torch's word for a store that no worker is to serve
            }  # fmt: skip
            worker.channel.send("start", environment={name: str(value) for name, value in environment.items()})
        self._say("start", number=self.start, workers=[worker.process for worker in members])
        self.start += 1

    def _members(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.rank >= 0 and worker.state in ("running", "done")]

    # What is done.
    def _start_worker(self) -> None:
        here, there = socket.socketpair()
        process = os.fork()
        if not process:
            self._be_worker(there)
        there.close()
        here.setblocking(False)
        worker = Worker(process, os.pidfd_open(process), Channel(here), time.monotonic())
        self.workers.append(worker)
        for source in (worker.end, here):
            self._selector.register(source, selectors.EVENT_READ, worker)

    def _new_store(self) -> StoreProcess:
        """Replace the store, as that of the start before is full of its addresses."""
        if self.store is not None:
            self.store.end()
        self.store = StoreProcess(self._descriptors())
        return self.store

    def _descriptors(self) -> list[int]:
        """Return what forks must let go, so that the others hear of the launcher's end."""
        return [fd for worker in self.workers for fd in (worker.end, worker.channel.socket.fileno())]

    def _be_worker(self, end: socket.socket) -> NoReturn:
        status = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._selector.close()
            for descriptor in self._descriptors():
                os.close(descriptor)
            if self.store is not None:
                self.store.channel.close()
            status = self.work(self.spec, Channel(end))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _end_all(self) -> None:
        """End what is left: those that are done by themselves, the others by a signal."""
        for worker in self.workers:
            if not worker.channel.send("end") or worker.state != "done":
                worker.signal(signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_SECONDS
        while self.workers and self._selector.select(max(0.0, deadline - time.monotonic())):
            self._forget_ended()
        for worker in self.workers:
            worker.signal(signal.SIGKILL)
            os.waitpid(worker.process, 0)
        if self.store is not None:
            self.store.end()
        if self._events is not None:
            self._events.close()

    def _forget_ended(self) -> None:
        for worker in list(self.workers):
            worker.channel.receive()
            if os.waitpid(worker.process, os.WNOHANG)[0]:
                self._forget(worker)

    def _say(self, event: str, at: float | None = None, **what: Any) -> None:
        if self._events is not None:
            seconds = time.monotonic() if at is None else at
            self._events.write(json.dumps({"event": event, "seconds": seconds, **what}) + "\n")
