"""Work in a forked process with bounds: of time, so that what blocks is found, and of memory."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 30
"""That a child may allocate on top of what it was forked with."""


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        value: what the work returned, as JSON values; None where it returned nothing.
        peak_bytes: of memory, on top of what was there at the fork.
        hung: it was still at work when its time was over.
        signal: that ended it, or 0.
        error: that the work raised, with its traceback; "" for none.
    """

    value: Any
    peak_bytes: int = 0
    hung: bool = False
    signal: int = 0
    error: str = ""

    @property
    def sound(self) -> Any:
        """Return the value. Raises RuntimeError where the work did not come to its end."""
        if self.hung or self.signal or self.error:
            raise RuntimeError(f"a process has not come to its end: {self}")
        return self.value


class Child:
    """A forked process that does some work."""

    def __init__(self, work: Callable[[], Any], most_bytes: int = MOST_BYTES) -> None:
        self._pipe, theirs = os.pipe()
        self.pid = _fork()
        if self.pid == 0:
            os.close(self._pipe)
            _work(work, theirs, most_bytes)
        os.close(theirs)

    def kill(self) -> None:
        """End it at once; `wait` says how it ended."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> Ended:
        """Wait until it has ended, for a time; it is gone then, at work or not."""
        line = None
        try:
            line = _line(self._pipe, time.monotonic() + seconds)
        finally:
            os.close(self._pipe)
            if line is None:
                self.kill()
            status = os.waitpid(self.pid, 0)[1]
        if not line:
            return Ended(None, hung=line is None, signal=os.WTERMSIG(status) if line is not None else 0)
        told = json.loads(line)
        return Ended(told["value"], told["peak_bytes"], error=told["error"])


def in_child(work: Callable[[], Any], *, seconds: float, most_bytes: int = MOST_BYTES) -> Ended:
    """Call `work` in a forked process, and return how that ended."""
    return Child(work, most_bytes).wait(seconds)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which nothing here waits for
        return os.fork()


def _work(work: Callable[[], Any], pipe: int, most_bytes: int) -> None:
    """Do the work in the child; never returns."""
    status = 1
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        pages = [int(word) * resource.getpagesize() for word in Path("/proc/self/statm").read_text().split()]
        resident, data = pages[1], pages[5]
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (data + most_bytes, hard))  # not of files that are mapped
        try:
            told = {"value": work(), "error": ""}
        except BaseException:
            told = {"value": None, "error": traceback.format_exc()}
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        peak = max(0, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - resident)
        line = json.dumps({**told, "peak_bytes": peak}).encode() + b"\n"
        while line:
            line = line[os.write(pipe, line) :]
        status = 0
    finally:
        os._exit(status)


def _line(pipe: int, until: float) -> bytes | None:
    """Read a line; nothing where the other end is closed before it is whole, None where the time is over."""
    read = b""
    while not read.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        if not (got := os.read(pipe, 1 << 16)):
            return b""
        read += got
    return read
