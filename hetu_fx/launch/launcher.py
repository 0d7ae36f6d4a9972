"""`hetu-fx launch`: starts a script in several processes, and lets the others go on when one is lost.

A worker's end is noticed at once; one that is stopped gives no sign of life, and is ended. The others are told, so that
whoever waits for a message gets an error; they leave their groups, are numbered anew, and run the script again in the
same processes. What happens can be told to a file, as lines of JSON.

Of several machines each has a launcher. They meet by `launch_rounds`, and each tells its workers what concerns them.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from hetu_fx.base.cgroups import MemoryKills
from hetu_fx.base.words import exit_text
from hetu_fx.checkpoint.snapshot_folders import JOB_VARIABLE
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.launch.job import NO_RUN_ID, LaunchSpec, Message, MessageChannel, WorkerProcess, start_worker, verdicts
from hetu_fx.launch.launch_rounds import OUT_OF_REACH_STATUS, LaunchRound, LocalRounds, NodeRounds
from hetu_fx.report.sinks import JsonLines

GAVE_UP_STATUS = 70
LOOK_SECONDS = 0.02  # between looks at what no event tells
ENDED_ELSEWHERE_STATUS = 1


@dataclass(slots=True, repr=False)
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
    reason: str = ""  # why the run before has failed
    is_asking: bool = False  # for the next start
    drain_until: float | None = None  # this machine leaves the job at a step's end, or at this time
    nodes: tuple[str, ...] = ()  # the machines of the run under way
    rounds: LocalRounds | NodeRounds = field(init=False)
    _goodbye: dict[str, Any] = field(default_factory=lambda: {"reason": "its launcher was ended", "is_of_all": False})
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _memory_kills: MemoryKills = field(default_factory=MemoryKills)
    _events: JsonLines | None = None

    def run(self) -> int:
        """Run the job to its end; return the exit status."""
        self._events = None if self.spec.events is None else JsonLines(self.spec.events, "a")
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        self.rounds = self._rounds()
        try:
            while self.status is None:
                self._fill_up()
                self._begin_if_ready()
                self._invite()
                self._drain()
                self._handle_events()
                self._notice_gone()
                self._judge()
            return self.status
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _rounds(self) -> LocalRounds | NodeRounds:
        if self.spec.nodes is None:
            return LocalRounds(self._descriptors)
        rounds = NodeRounds(self.spec.nodes, self._descriptors)
        self._selector.register(rounds.channel.socket, selectors.EVENT_READ)
        return rounds

    # What happens.

    def _handle_events(self) -> None:
        for key, _ in self._selector.select(timeout=min(LOOK_SECONDS, self.spec.beat_seconds)):
            worker: WorkerProcess | None = key.data
            if worker is None:
                self._hear_of_others()
                continue
            seen, is_end = time.monotonic(), key.fileobj == worker.end
            for message in worker.channel.receive() or ():
                self._told(worker, message)
            if is_end:
                self._forget(worker)
                self._ended(worker, seen)

    def _hear_of_others(self) -> None:
        """Hear of the other machines."""
        assert isinstance(self.rounds, NodeRounds)
        messages = self.rounds.channel.receive()
        if messages is None:
            self._end_with(GAVE_UP_STATUS, "the process at the rendezvous is gone")
        for message in messages or ():
            match message:
                case {"kind": "lost", "reason": reason}:
                    if not self.is_over:
                        self._fail(reason)
                case {"kind": "join"}:
                    self._ask_to_leave()
                case {"kind": "closed", "reason": ""}:
                    self.status, self._goodbye = 0, {"reason": "", "is_of_all": True}
                case {"kind": "closed", "reason": reason}:
                    self._end_with(ENDED_ELSEWHERE_STATUS, f"the job has ended: {reason}")
                case {"kind": "refused", "reason": reason, "was_in": True}:
                    self._end_with(OUT_OF_REACH_STATUS, reason)
                case {"kind": "refused", "reason": reason}:
                    raise EnvironmentProblem(reason)
                case _:
                    self.rounds.take(message)

    def _end_with(self, status: int, reason: str) -> None:
        """End the job, on all machines, with a status."""
        self.status, self._goodbye = status, {"reason": reason, "is_of_all": True}
        print(f"hetu-fx launch: {reason}", file=sys.stderr)

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
                if self.failed_at is None and all(w.state == "done" for w in self._members()) and self.rounds.finish():
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
        if code > 0 and not worker.verdict:
            self._end_with(code, f"{worker.name} {exit_text(code)}")
            return
        reason = self._tell_lost(worker, code, worker.gone_at or seen)
        self._count_loss(reason)
        if self.status is None and worker.state in ("running", "done"):
            self._fail(reason)

    def _tell_lost(self, worker: WorkerProcess, code: int, seen: float) -> str:
        """Tell of a process that is lost since then; return why."""
        reason = self._reason(worker, code)
        if worker.gone_at is not None:  # it has been said that it is gone, and not yet why
            print(f"hetu-fx launch: {reason}", file=sys.stderr)
        self.lost_at = seen
        self._say("lost", worker=worker.process, rank=worker.rank, reason=reason, at=seen)
        return reason

    def _reason(self, worker: WorkerProcess, code: int) -> str:
        """Say why a process is lost that has ended with an exit code, -n for signal n."""
        if worker.verdict or code != -signal.SIGKILL:
            return worker.verdict or f"{worker.name} {exit_text(code)}"
        cgroup = self._memory_kills.cgroup_of(worker.process)
        by = "" if cgroup is None else f", by the kernel: memory has run out in its cgroup {cgroup}"
        return f"{worker.name} {exit_text(code)}{by}"

    def _count_loss(self, reason: str) -> None:
        self.losses += 1
        if self.losses > self.spec.max_losses:
            self._end_with(GAVE_UP_STATUS, f"{self.losses} workers are lost, the last: {reason}")

    def _fail(self, reason: str) -> None:
        """Tell all others that this run is over."""
        if self.failed_at is not None:
            return
        self.failed_at, self.is_over, self.reason = time.monotonic(), True, reason
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
        if self.drain_until is not None:
            return
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
            self._ask_to_leave()

    def _ask_to_leave(self) -> None:
        """Have those that run the script end it at a step's end."""
        for worker in self._members():
            worker.channel.send("join")

    def _drain(self) -> None:
        """Leave the job once nobody here runs the script; with SIGTERM to those that do not leave it in time."""
        if self.drain_until is None:
            return
        if not self._members():
            reason = self.reason or ("it leaves before the start" if self.is_asking else "")
            self.status, self._goodbye = 0, {"reason": reason, "is_of_all": False}
        elif not self.has_invited:
            self.has_invited = True
            self._ask_to_leave()
        elif time.monotonic() > self.drain_until:
            self.status = 128 + signal.SIGTERM
            print("hetu-fx launch: the script does not end at a step's end: ending all workers", file=sys.stderr)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Leave the other machines at a step's end, on a first SIGTERM; else end all workers here."""
        others = len(self.nodes) > 1 or (self.spec.nodes is not None and not self._members())
        if number == signal.SIGTERM and others and self.drain_until is None:
            self.drain_until = time.monotonic() + self.spec.grace_seconds
            print("hetu-fx launch: SIGTERM: leaving the other machines at a step's end", file=sys.stderr)
            return
        print(f"hetu-fx launch: {signal.Signals(number).name}: ending all workers", file=sys.stderr)
        sys.exit(128 + number)

    def _begin_if_ready(self) -> None:
        """Start the script once nobody runs it and enough processes are ready."""
        if (
            not self.is_over
            or self.drain_until is not None
            or any(w.state in ("running", "done") for w in self.workers)
        ):
            return
        idle = sorted((w for w in self.workers if w.state == "idle"), key=lambda w: (w.rank < 0, w.rank))
        enough = self.spec.min_nproc if self.start else self.spec.nproc
        if len(idle) < enough:
            return
        self.is_asking = True
        settled = self.rounds.ask(min(len(idle), self.spec.nproc), self.reason)
        if settled is not None:
            self._begin(idle[: self.spec.nproc], settled)

    def _begin(self, members: Sequence[WorkerProcess], settled: LaunchRound) -> None:
        self.failed_at, self.is_over, self.has_invited, self.is_asking, self.reason = None, False, False, False, ""
        self.nodes = settled.nodes
        if self.spec.nodes is not None:
            here, names = self.nodes[settled.node], ", ".join(self.nodes)
            print(f"hetu-fx launch: {here} starts in {names}, world size {settled.world}", file=sys.stderr)
        for worker in self.workers:
            worker.rank = worker.rank if worker.state == "gone" else -1
        for number, worker in enumerate(members):
            worker.rank, worker.state, worker.wait = settled.first_rank + number, "running", None
            environment = {
                "RANK": worker.rank, "LOCAL_RANK": number, "GROUP_RANK": settled.node,
                "WORLD_SIZE": settled.world, "LOCAL_WORLD_SIZE": len(members), "GROUP_WORLD_SIZE": len(settled.nodes),
                "MASTER_ADDR": settled.address, "MASTER_PORT": settled.port, "HETU_FX_START": self.start,
                "TORCHELASTIC_USE_AGENT_STORE": True,  # torch's word for a store that no worker is to serve
            }  # fmt: skip
            if self.spec.nodes is not None and self.spec.nodes.run_id != NO_RUN_ID:  # names what snapshots keep
                environment[JOB_VARIABLE] = os.environ.get(JOB_VARIABLE, self.spec.nodes.run_id)
            worker.channel.send("start", environment={name: str(value) for name, value in environment.items()})
        self._say("start", number=self.start, workers=[worker.process for worker in members])
        self.start += 1

    def _members(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.rank >= 0 and worker.state in ("running", "done")]

    # What is done.
    def _start_worker(self) -> None:
        worker = start_worker(lambda channel: self.work(self.spec, channel), self._descriptors())
        self.workers.append(worker)
        for source in (worker.end, worker.channel.socket):
            self._selector.register(source, selectors.EVENT_READ, worker)

    def _descriptors(self) -> list[int]:
        """Return what forks must let go, so that the others hear of the launcher's end."""
        own = [fd for worker in self.workers for fd in (worker.end, worker.channel.socket.fileno())]
        selector = [self._selector.fileno()] if isinstance(self._selector, selectors.EpollSelector) else []
        return [*own, *self.rounds.descriptors(), *selector]

    def _end_all(self) -> None:
        """End what is left: those that are done by themselves, the others by a signal, on which they may save."""
        self.rounds.close(**self._goodbye)
        if isinstance(self.rounds, NodeRounds):
            self._selector.unregister(self.rounds.channel.socket)
        for worker in self.workers:
            if not worker.channel.send("end") or worker.state != "done":
                worker.signal(signal.SIGTERM)
        deadline = time.monotonic() + self.spec.grace_seconds
        while self.workers and self._selector.select(max(0.0, deadline - time.monotonic())):
            self._forget_ended()
        for worker in self.workers:
            worker.signal(signal.SIGKILL)
            os.waitpid(worker.process, 0)
        self.rounds.end()
        if self._events is not None:
            self._events.close()

    def _forget_ended(self) -> None:
        for worker in list(self.workers):
            worker.channel.receive()
            ended, status = os.waitpid(worker.process, os.WNOHANG)
            if ended and worker.gone_at is not None:  # the job was done before the kernel had taken it apart
                self._tell_lost(worker, os.waitstatus_to_exitcode(status), worker.gone_at)
            if ended:
                self._forget(worker)

    def _say(self, event: str, at: float | None = None, **what: Any) -> None:
        """Tell an event of now, or of `at` (time.monotonic)."""
        if self._events is not None:
            self._events.tell({"event": event, "seconds": time.monotonic() if at is None else at, **what})
