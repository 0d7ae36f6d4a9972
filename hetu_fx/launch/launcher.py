"""`hetu-fx launch`: starts a script in several processes, and lets the others go on when one is lost.

A worker's end is noticed at once; one that is stopped gives no sign of life, and is ended. The others are told, so that
whoever waits for a message gets an error; they leave their groups, are numbered anew, and run the script again in the
same processes. What happens can be told to a file, as lines of JSON.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

from hetu_fx.base.addresses import LOOPBACK
from hetu_fx.base.cgroups import MemoryKills
from hetu_fx.comm_ops.wire.rendezvous import serve_store
from hetu_fx.launch.emulate.processes import describe_exit
from hetu_fx.launch.job import LaunchSpec, Message, MessageChannel, WorkerProcess, fork_child, start_worker, verdicts
from hetu_fx.report.sinks import JsonLines

GAVE_UP_STATUS = 70
LOOK_SECONDS = 0.02  # between looks at what no event tells
STORE_SECONDS = 300.0


@dataclass(slots=True)
class JobLauncher:
    """Runs one job; `run` reads top to bottom. `work` is what a worker does; it returns the exit status."""

    spec: LaunchSpec
    work: Callable[[LaunchSpec, MessageChannel], int]
    workers: list[WorkerProcess] = field(default_factory=list)
    start: int = 0  # how often the script has been started
    losses: int = 0
    lost_at: float = 0.0  # the last one
    failed_at: float | None = None  # when the run under way failed; None while it goes well
    is_over: bool = True  # the script is to be started (again)
    has_invited: bool = False  # those that run it have been told that another one is ready
    status: int | None = None
    store: StoreProcess | None = None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _memory_kills: MemoryKills = field(default_factory=MemoryKills)
    _events: JsonLines | None = None

    def run(self) -> int:
        """Run the job to its end; return the exit status."""
        self._events = None if self.spec.events is None else JsonLines(self.spec.events, "a")
        before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self.status is None:
                self._fill_up()
                self._begin_if_ready()
                self._invite()
                self._handle_events()
                self._notice_gone()
                self._judge()
            return self.status
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    # What happens.

    def _handle_events(self) -> None:
        for key, _ in self._selector.select(timeout=min(LOOK_SECONDS, self.spec.beat_seconds)):
            worker: WorkerProcess = key.data
            seen, is_end = time.monotonic(), key.fileobj == worker.end
            for message in worker.channel.receive() or ():
                self._told(worker, message)
            if is_end:
                self._forget(worker)
                self._ended(worker, seen)

    def _told(self, worker: WorkerProcess, message: Message) -> None:
        if worker.state == "gone":  # what it has said before it was lost counts no more
            return
        worker.last_sign = time.monotonic()
        match message["kind"]:
            case "beat" if "waits_for" in message:
                worker.wait = message["waits_for"], message["seconds"]
            case "beat":
                worker.wait = None
            case "ready":
                worker.state = "idle"
                self._memory_kills.watch(worker.process)
            case "ends":
                worker.has_said_so = True
            case "left":
                worker.state, self.is_over = "idle", True
            case "stopped":
                worker.state = "idle"
                self._say("stopped", worker=worker.process, rank=worker.rank, reason=message["reason"])
                if self.failed_at is None:  # nobody was lost: a run that ends so each time must not begin for ever
                    self._count_loss(f"{worker.name} stopped: {message['reason']}")
                self._fail(f"{worker.name} stopped: {message['reason']}")
            case "done":
                worker.state = "done" if self.failed_at is None else "idle"
                if self.failed_at is None and all(w.state == "done" for w in self._members()):
                    self.status = 0

    def _notice_gone(self) -> None:
        """Notice processes that are gone, though they have not ended yet."""
        for worker in self.workers:
            if worker.state != "gone" and not worker.has_said_so and worker.life.is_gone:
                state, worker.state = worker.state, "gone"
                worker.gone_at = self.lost_at = time.monotonic()
                if state in ("running", "done"):
                    self._fail(f"{worker.name} is gone")

    def _forget(self, worker: WorkerProcess) -> None:
        self.workers.remove(worker)
        for source in (worker.end, worker.channel.socket):
            self._selector.unregister(source)
        os.close(worker.end)
        worker.channel.socket.close()

    def _ended(self, worker: WorkerProcess, seen: float) -> None:
        """Judge why a process has ended: by its own error, or lost."""
        code = os.waitstatus_to_exitcode(os.waitpid(worker.process, 0)[1])
        seen = worker.gone_at or seen
        if code > 0 and not worker.verdict:
            self.status = code
            print(f"hetu-fx launch: {worker.name} {describe_exit(code)}", file=sys.stderr)
            return
        reason = self._reason(worker, code)
        if worker.gone_at is not None:  # it has been said that it is gone, and not yet why
            print(f"hetu-fx launch: {reason}", file=sys.stderr)
        self.lost_at = seen
        self._say("lost", worker=worker.process, rank=worker.rank, reason=reason, at=seen)
        self._count_loss(reason)
        if self.status is None and worker.state in ("running", "done"):
            self._fail(reason)

    def _reason(self, worker: WorkerProcess, code: int) -> str:
        """Say why a process is lost that has ended with an exit code, -n for signal n."""
        if worker.verdict or code != -signal.SIGKILL:
            return worker.verdict or f"{worker.name} {describe_exit(code)}"
        cgroup = self._memory_kills.cgroup_of(worker.process)
        by = "" if cgroup is None else f", by the kernel: memory has run out in its cgroup {cgroup}"
        return f"{worker.name} {describe_exit(code)}{by}"

    def _count_loss(self, reason: str) -> None:
        self.losses += 1
        if self.losses > self.spec.max_losses:
            print(f"hetu-fx launch: {self.losses} workers are lost, the last: {reason}", file=sys.stderr)
            self.status = GAVE_UP_STATUS

    def _fail(self, reason: str) -> None:
        """Tell all others that this run is over."""
        if self.failed_at is not None:
            return
        self.failed_at, self.is_over = time.monotonic(), True
        print(f"hetu-fx launch: {reason}; the others keep running", file=sys.stderr)
        for worker in self._members():
            worker.channel.send("lost", reason=reason)
            if worker.state == "done":
                worker.state = "idle"

    # What is decided.

    def _judge(self) -> None:
        for worker, verdict in verdicts(self.workers, self.spec, time.monotonic(), self.failed_at):
            if not worker.verdict:
                worker.verdict = verdict
                worker.signal(signal.SIGKILL)

    def _fill_up(self) -> None:
        """Start processes: all at first, others where too few are left, or where lost ones are to come back."""
        comes_back = self.spec.rejoin_seconds is not None and time.monotonic() - self.lost_at > self.spec.rejoin_seconds
        left = sum(worker.state != "gone" for worker in self.workers)
        if self.start == 0 or left < self.spec.min_nproc or comes_back:
            for _ in range(self.spec.nproc - left):
                self._start_worker()

    def _invite(self) -> None:
        """Tell those that run the script that others are ready to join them."""
        ready = [worker.process for worker in self.workers if worker.state == "idle"]
        if ready and not self.is_over and not self.has_invited:
            self.has_invited = True
            self._say("ready to join", workers=ready)
            for worker in self._members():
                worker.channel.send("join")

    def _begin_if_ready(self) -> None:
        """Start the script once nobody runs it and enough processes are ready."""
        if not self.is_over or any(w.state in ("running", "done") for w in self.workers):
            return
        idle = sorted((w for w in self.workers if w.state == "idle"), key=lambda w: (w.rank < 0, w.rank))
        enough = self.spec.min_nproc if self.start else self.spec.nproc
        if len(idle) < enough:
            return
        self._begin(idle[: self.spec.nproc])

    def _begin(self, members: Sequence[WorkerProcess]) -> None:
        world, self.failed_at, self.is_over, self.has_invited = len(members), None, False, False
        port = self._new_store().port
        for worker in self.workers:
            worker.rank = worker.rank if worker.state == "gone" else -1
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

    def _members(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.rank >= 0 and worker.state in ("running", "done")]

    # What is done.
    def _start_worker(self) -> None:
        store = [] if self.store is None else [self.store.channel.fileno()]
        worker = start_worker(lambda channel: self.work(self.spec, channel), [*self._descriptors(), *store])
        self.workers.append(worker)
        for source in (worker.end, worker.channel.socket):
            self._selector.register(source, selectors.EVENT_READ, worker)

    def _new_store(self) -> StoreProcess:
        """Replace the store, as that of the start before is full of its addresses."""
        if self.store is not None:
            self.store.end()
        self.store = StoreProcess(self._descriptors())
        return self.store

    def _descriptors(self) -> list[int]:
        """Return what forks must let go, so that the others hear of the launcher's end."""
        own = [fd for worker in self.workers for fd in (worker.end, worker.channel.socket.fileno())]
        return [*own, *([self._selector.fileno()] if isinstance(self._selector, selectors.EpollSelector) else [])]

    def _end_all(self) -> None:
        """End what is left: those that are done by themselves, the others by a signal, on which they may save."""
        for worker in self.workers:
            if not worker.channel.send("end") or worker.state != "done":
                worker.signal(signal.SIGTERM)
        deadline = time.monotonic() + self.spec.grace_seconds
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
        """Tell an event of now, or of `at` (time.monotonic)."""
        if self._events is not None:
            self._events.tell({"event": event, "seconds": time.monotonic() if at is None else at, **what})


def _leave(number: int, frame: FrameType | None) -> None:
    print(f"hetu-fx launch: {signal.Signals(number).name}: ending all workers", file=sys.stderr)
    sys.exit(128 + number)


class StoreProcess:
    """A process that serves a new store on `port` of this machine until `end`, or until its parent is gone.

    In it the workers of one start meet; it is a process of its own, so that no worker takes it along: who connects to
    a store that is gone tries for minutes, and cannot be told to leave off (torch 2.13). For `others` see `forked`.
    """

    def __init__(self, others: Iterable[int] = ()) -> None:
        self.process, self.channel = fork_child(_serve, others)
        self.port = int(self.channel.recv(16))

    def end(self) -> None:
        """Stop serving; whoever waits for a key gets an error."""
        self.channel.close()
        os.waitpid(self.process, 0)


def _serve(channel: socket.socket) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):  # workers that are told to end still meet here
        signal.signal(number, signal.SIG_IGN)
    store = serve_store(LOOPBACK, 0, timedelta(seconds=STORE_SECONDS))
    channel.send(str(store.port).encode())
    return len(channel.recv(1))  # nobody writes: the other end is closed, or gone
