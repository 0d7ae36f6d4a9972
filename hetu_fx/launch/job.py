"""A launched job: what is to be run and borne, its workers as the launcher sees them, and which of them it ends.

Workers are forks of the launcher, which has imported what takes seconds. It and they tell each other messages, lines of
JSON over a pair of sockets, and signs of life.

A process counts as ended, and its connections are closed, only once the kernel has taken its memory apart, a second for
a few gigabytes. But a robust mutex that a thread of it holds (pthread_mutexattr_setrobust(3)) is marked first of all.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetu_fx.base.launcher_end import end_with_parent
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.launch.times import Times

NO_RUN_ID = "none"  # torchrun's word too


@dataclass(frozen=True, slots=True)
class NodesSpec:
    """The machines of a job, and where they meet.

    Attributes:
        least: as few machines are enough.
        most: further ones wait.
        endpoints: `host:port,...`, where the rendezvous is served, by the machine of the first that is there.
        run_id: of the job; all machines have the same.
        times: what the rendezvous waits for.
    """

    least: int
    most: int
    endpoints: str
    run_id: str = NO_RUN_ID
    times: Times = field(default_factory=Times)

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise EnvironmentProblem(
                f"--nnodes is {self.least}:{self.most}\nhint: give the least and the most, like --nnodes 1:3"
            )

    @classmethod
    def of(cls, counts: str, endpoints: str | None, run_id: str, conf: str) -> NodesSpec:
        """Read the command line, which has torchrun's words. Raises EnvironmentProblem for what cannot be."""
        least, _, most = counts.partition(":")
        if not least.isdigit() or not (most or least).isdigit():
            raise EnvironmentProblem(f"--nnodes is {counts!r}\nhint: give a number of machines, or like 1:3 two")
        if not endpoints:
            raise EnvironmentProblem(
                "--nnodes needs --rdzv-endpoint\nhint: give all machines the same, like --rdzv-endpoint 10.0.0.1:29400"
            )
        given = dict(pair.partition("=")[::2] for pair in conf.split(",") if pair)
        return cls(int(least), int(most or least), endpoints, run_id, Times.of(given))


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What is to be run, and what is borne.

    Attributes:
        command: the script and its arguments.
        nproc: processes to begin with.
        min_nproc: as few are enough to go on; below, others are started first.
        max_losses: workers that may be lost before the launcher gives up.
        stopped_seconds: after so long without a sign of life a worker is taken for stopped, and ended.
        stuck_seconds: after so long in one communication those that are not in it are ended (all, if all are).
        grace_seconds: for the others to leave their groups when one is lost, then they are ended too; and for all
            to end by themselves after SIGTERM.
        rejoin_seconds: after so long a lost one is started again and joins those that went on; None: never.
        events: a file for what happens, a line of JSON each.
        nodes: the machines of the job; None where this is the only one.
    """

    command: tuple[str, ...]
    nproc: int
    min_nproc: int
    max_losses: int = 100
    stopped_seconds: float = 10.0
    stuck_seconds: float = 600.0
    grace_seconds: float = 30.0
    rejoin_seconds: float | None = None
    events: Path | None = None
    nodes: NodesSpec | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise EnvironmentProblem("no script given\nhint: write hetu-fx launch --nproc 2 -- SCRIPT ARGUMENTS")
        if not 1 <= self.min_nproc <= self.nproc:
            raise EnvironmentProblem(f"--min-nproc is {self.min_nproc}\nhint: give 1 to --nproc {self.nproc}")
        if min(self.stopped_seconds, self.stuck_seconds, self.grace_seconds) <= 0:
            seconds = self.stopped_seconds, self.stuck_seconds, self.grace_seconds
            raise EnvironmentProblem(
                f"--stopped-after, --stuck-after, --grace are {seconds}\nhint: give more than 0 seconds"
            )
        if self.rejoin_seconds is not None and self.rejoin_seconds < 0:
            raise EnvironmentProblem(f"--rejoin-after is {self.rejoin_seconds:g}\nhint: give 0 seconds or more")

    @property
    def beat_seconds(self) -> float:
        """Seconds between signs of life."""
        return min(self.stopped_seconds / 10, 0.5)

    @property
    def news_seconds(self) -> float:
        """Seconds after an error within which it is told that another process, or machine, is lost."""
        return NEWS_SECONDS + (2 * self.nodes.times.silent if self.nodes else 0.0)


NEWS_SECONDS = 2.0

Message = dict[str, Any]


class MessageChannel:
    """One end; several threads may send, one receives."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._received = b""
        self._lock = threading.Lock()

    def send(self, kind: str, **what: Any) -> bool:
        """Send a message; returns whether the other end is there."""
        line = json.dumps({"kind": kind, **what}).encode() + b"\n"
        try:
            with self._lock:
                self.socket.sendall(line)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[Message, ...] | None:
        """Return the messages that are there (waiting for one, if the socket blocks); None if the other end is gone."""
        try:
            got = self.socket.recv(65536)
        except BlockingIOError:
            return ()
        except OSError:
            return None
        if not got:
            return None
        *lines, self._received = (self._received + got).split(b"\n")
        return tuple(json.loads(line) for line in lines)

    def messages(self) -> Iterator[Message]:
        """Yield messages until the other end is gone."""
        while (received := self.receive()) is not None:
            yield from received


_MUTEX_BYTES = 64  # of what the C library keeps of a mutex and of its attributes, and more
_PROCESS_SHARED = _ROBUST = 1
_OWNER_DIED = 0x40000000  # linux/futex.h


class LivenessLock:
    """Made before a fork. The child holds it, the parent looks at it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)  # shared with children
        self._mutex = (ctypes.c_char * _MUTEX_BYTES).from_buffer(self._memory)
        attributes = (ctypes.c_char * _MUTEX_BYTES)()
        _call("mutexattr_init", attributes)
        _call("mutexattr_setpshared", attributes, _PROCESS_SHARED)
        _call("mutexattr_setrobust", attributes, _ROBUST)
        _call("mutex_init", self._mutex, attributes)

    def hold(self) -> None:
        """Hold it for as long as this thread is there; to be called once."""
        _call("mutex_lock", self._mutex)

    @property
    def is_gone(self) -> bool:
        """Tell whether the thread that held it is gone; False while nobody has held it."""
        # The first word is the futex in glibc. Where it is another one, the process is missed at its end only.
        return bool(int.from_bytes(self._memory[:4], sys.byteorder) & _OWNER_DIED)


def _call(name: str, *arguments: object) -> None:
    status = getattr(ctypes.CDLL(None), f"pthread_{name}")(*arguments)
    if status:
        raise OSError(status, f"pthread_{name} failed")


@dataclass(slots=True)
class WorkerProcess:
    """A process as the launcher sees it: `state` is starting, idle, running, done or gone.

    `end` is a file descriptor that can be read once the process has ended, also where children of it hold its channel.
    """

    process: int
    end: int
    channel: MessageChannel
    life: LivenessLock
    last_sign: float
    state: str = "starting"
    rank: int = -1
    wait: tuple[str, float] | None = None
    has_said_so: bool = False  # that it ends
    gone_at: float | None = None  # when it was noticed, before its end
    verdict: str = ""  # why the launcher has ended it

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process})" if self.rank >= 0 else f"process {self.process}"

    def signal(self, number: int) -> None:
        """Send a signal; it has been waited for by nobody else, so that the process is there, or its remains."""
        os.kill(self.process, number)


def _spelled(wait: tuple[str, float] | None) -> str:
    """Say what is waited for, and since when."""
    return "" if wait is None else f", waiting for {wait[0]} since {wait[1]:.1f} s"


def verdicts(
    workers: Sequence[WorkerProcess], spec: LaunchSpec, now: float, failed_at: float | None
) -> Iterator[tuple[WorkerProcess, str]]:
    """Yield workers that are stopped, stuck, or do not leave their groups, and what is said of each.

    `now` and `failed_at` (when the run under way failed; None while it goes well) are times of time.monotonic.
    """
    running = [worker for worker in workers if worker.state in ("running", "done")]
    for worker in workers:
        silent = now - worker.last_sign
        if worker.state not in ("starting", "gone") and silent > spec.stopped_seconds:
            yield worker, f"{worker.name} has given no sign of life for {silent:.1f} s{_spelled(worker.wait)}"
    if failed_at is None:
        yield from _missing(running, spec.stuck_seconds, is_alone=spec.nodes is None)
    elif now - failed_at > spec.grace_seconds:
        yield from ((worker, f"{worker.name} did not leave its groups{_spelled(worker.wait)}") for worker in running)


def _missing(
    running: Sequence[WorkerProcess], seconds: float, *, is_alone: bool
) -> Iterator[tuple[WorkerProcess, str]]:
    """Yield those whom others have waited for so long; all that wait, where all do and nobody is elsewhere."""
    stuck = [worker for worker in running if worker.wait is not None and worker.wait[1] > seconds]
    others = [worker for worker in running if worker.wait is None or worker.wait[1] < seconds / 2]
    for worker in (others or stuck if is_alone else others) if stuck else ():
        yield worker, f"{stuck[0].name}{_spelled(stuck[0].wait)}, and {worker.name} does not come"


def start_worker(work: Callable[[MessageChannel], int], others: Iterable[int]) -> WorkerProcess:
    """Start a process that does `work` and ends with the status that it returns; for `others` see `forked`."""
    life = LivenessLock()

    def be_worker(end: socket.socket) -> int:
        life.hold()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        channel = MessageChannel(end)
        try:
            return work(channel)
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            channel.send("ends")

    process, end = fork_child(be_worker, others)
    end.setblocking(False)
    return WorkerProcess(process, os.pidfd_open(process), MessageChannel(end), life, time.monotonic())


def fork_child(act: Callable[[socket.socket], int], others: Iterable[int]) -> tuple[int, socket.socket]:
    """Start a process that ends with the status of `act`; return it, and the other end of what `act` is given.

    It leaves go of `others`, file descriptors that are the parent's alone, and is killed when the parent is gone.
    """
    here, there = socket.socketpair()
    parent = os.getpid()
    process = os.fork()
    if process:
        there.close()
        return process, here
    status = 1
    try:
        end_with_parent(parent)
        for descriptor in (here.fileno(), *others):
            os.close(descriptor)
        status = act(there)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
