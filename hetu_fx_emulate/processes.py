"""The processes of one emulation: started together, ended together, their output told apart."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from hetu_fx.base.words import exit_text

TIMEOUT_STATUS = 124  # what timeout(1) returns
TERMINATE_SECONDS = 5.0
NUM_KEPT_LINES = 60
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Output:
    """Whose output is shown, and whether each line names its rank."""

    prefix: bool = True
    only_rank: int | None = None

    def shows(self, rank: int) -> bool:
        return self.only_rank in (None, rank)

    def is_direct(self, rank: int) -> bool:
        """Tell whether the rank writes to our own output itself (so a progress bar sees the terminal)."""
        return self.shows(rank) and not self.prefix


Event = tuple[int | None, int]
"""A rank and its exit code, or None and the number of a signal that asks us to end."""


@dataclass(slots=True)
class Crew:
    """The running ranks. Made once, filled by `start`, waited for by `wait`, ended by `end`."""

    output: Output
    grace_seconds: float
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    failed_rank: int | None = None
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)
    _kept: dict[int, deque[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, rank: int, argv: Sequence[str], environment: Mapping[str, str], core: int | None) -> int:
        """Start a rank in a session of its own, so that Ctrl-C comes through us; return its pid.

        `core` pins it, where quotas are not to be had.
        """
        pipe = None if self.output.is_direct(rank) else subprocess.PIPE
        with _pinned(core):
            process = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
            )
        self.processes[rank] = process
        self.alive.add(rank)
        self._kept[rank] = deque(maxlen=NUM_KEPT_LINES)
        self._pump(rank, process.stdout, sys.stdout)
        self._pump(rank, process.stderr, sys.stderr)
        threading.Thread(target=self._await_end, args=(rank, process), daemon=True).start()
        return process.pid

    def wait(self, timeout_seconds: float | None) -> int:
        """Wait until every rank has ended; give the exit status of the whole.

        The first failure counts: its status, 128 + n for signal n, 124 for the timeout. The others get
        `grace_seconds` to end by themselves, since they often have something to say about it.
        """
        status: int | None = None
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self.alive:
            match self._next_event(deadline):
                case int() as rank, code:
                    self.alive.discard(rank)
                    if code != 0 and status is None:
                        status, self.failed_rank = (code if code > 0 else 128 - code), rank
                        self._say_failure(rank, code)
                        deadline = self._within_grace(deadline)
                case None, number:
                    self.signal(signal.SIGTERM if number == signal.SIGPIPE else number)
                    deadline = self._within_grace(deadline) if status is None else time.monotonic()
                    status = 128 + number
                case None:
                    if status is None:
                        status = TIMEOUT_STATUS
                        self.say(f"ranks {sorted(self.alive)} still run after {timeout_seconds:g} s")
                    self.end()
        return status or 0

    def end(self) -> None:
        """End every rank that still runs: ask first, then kill."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_SECONDS
        while self.alive and (event := self._next_event(deadline)) is not None and event[0] is not None:
            self.alive.discard(event[0])
        for process in self.processes.values():
            with contextlib.suppress(OSError):  # the whole group, helpers of the rank included, may be gone
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        self.alive.clear()

    def signal(self, number: int) -> None:
        """Pass a signal on to every rank that still runs, with the helpers it started."""
        for rank in self.alive:
            with contextlib.suppress(OSError):
                os.killpg(self.processes[rank].pid, number)

    def close(self) -> None:
        """Show what is left of the output, and why a hidden rank failed. Call when all processes are gone."""
        for thread in self._threads:
            thread.join(timeout=TERMINATE_SECONDS)
        if self.failed_rank is not None and not self.output.shows(self.failed_rank):
            for line in self._kept[self.failed_rank]:
                self._write(sys.stderr, f"[{self.failed_rank}] {line}")

    def say(self, text: str) -> None:
        """Tell the user something about the run."""
        with contextlib.suppress(BrokenPipeError):
            self._write(sys.stderr, f"hetu-fx emulate: {text}\n")

    @contextlib.contextmanager
    def forwarding(self) -> Iterator[None]:
        """Take the signals that ask us to end, for as long as the block lasts (main thread only)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._events.put((None, number))

    def _next_event(self, deadline: float | None) -> Event | None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._events.get(timeout=left)
        except queue.Empty:
            return None

    def _within_grace(self, deadline: float | None) -> float:
        grace = time.monotonic() + self.grace_seconds
        return grace if deadline is None else min(deadline, grace)

    def _await_end(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._events.put((rank, process.wait()))

    def _pump(self, rank: int, source: IO[bytes] | None, target: IO[str]) -> None:
        if source is not None:
            thread = threading.Thread(target=self._copy, args=(rank, source, target), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _copy(self, rank: int, source: IO[bytes], target: IO[str]) -> None:
        """Copy lines until the rank closes its end. A reader of ours that went away ends the run."""
        shown = self.output.shows(rank)
        for raw in source:
            text = raw.decode(errors="replace").rstrip("\r\n")
            line = text.rpartition("\r")[2] + "\n"  # of a progress bar's states, the last
            self._kept[rank].append(line)
            if shown:
                try:
                    self._write(target, f"[{rank}] {line}")
                except (BrokenPipeError, ValueError):
                    shown = False
                    self._events.put((None, signal.SIGPIPE))

    def _write(self, target: IO[str], text: str) -> None:
        with self._lock:
            target.write(text)
            target.flush()

    def _say_failure(self, rank: int, code: int) -> None:
        others = f"; the others get {self.grace_seconds:g} s to end" if self.alive else ""
        self.say(f"rank {rank} {exit_text(code)}{others}")


@contextlib.contextmanager
def _pinned(core: int | None) -> Iterator[None]:
    """Pin this thread for as long as the block lasts: a child that is started inside inherits it."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
