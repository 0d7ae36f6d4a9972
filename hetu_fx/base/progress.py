"""What long work says on stderr while it lasts: nothing of what is soon over, and nothing on stdout.

On a terminal a line that is written anew each second, elsewhere a line every ten seconds. The first process of a host
speaks for all. HETU_FX_PROGRESS=0 says nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

VARIABLE = "HETU_FX_PROGRESS"
PATIENCE_SECONDS = 2.0
"""What is over by then is not told on a terminal."""

EVERY_SECONDS = 10.0
"""How often a log is told, and after how long first."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How a stream is told: after how many seconds, how often then, and whether each line replaces the one before."""

    first_seconds: float
    every_seconds: float
    replaces: bool


TERMINAL = Rhythm(PATIENCE_SECONDS, 1.0, True)
LOG = Rhythm(EVERY_SECONDS, EVERY_SECONDS, False)


@contextmanager
def telling(what: str, stream: TextIO | None = None, rhythm: Rhythm | None = None) -> Iterator[None]:
    """Say what is done for as long as a block lasts, if it lasts; `what` is like "capturing the model"."""
    if not speaks():
        yield
        return
    stream = sys.stderr if stream is None else stream
    line = _Line(what, stream, rhythm or (TERMINAL if stream.isatty() else LOG))
    ended = threading.Event()
    speaker = threading.Thread(target=line.tell_until, args=(ended.wait,), daemon=True, name="hetu_fx progress")
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()
        line.end()


def speaks() -> bool:
    """Tell whether this process is the one of its host that speaks, and is wanted to."""
    return os.environ.get(VARIABLE, "1") != "0" and os.environ.get("LOCAL_RANK", "0") == "0"


class _Line:
    """What is said of one piece of work."""

    def __init__(self, what: str, stream: TextIO, rhythm: Rhythm) -> None:
        self._what, self._stream, self._rhythm = what, stream, rhythm
        self._start, self._told = time.monotonic(), False

    def tell_until(self, ends: Callable[[float], bool]) -> None:
        """Tell from time to time, until `ends`, which waits for so many seconds, says that it is over."""
        seconds = self._rhythm.first_seconds
        while not ends(seconds):
            self._write(f"{self._what} ... {self._seconds} s")
            self._told, seconds = True, self._rhythm.every_seconds

    def end(self) -> None:
        """Say how long it took, if anything was said."""
        if self._told:
            self._write(f"{self._what}: {self._seconds} s", "\n")

    @property
    def _seconds(self) -> str:
        return f"{time.monotonic() - self._start:.0f}"

    def _write(self, text: str, last: str = "") -> None:
        begin, end = ("\r", last) if self._rhythm.replaces else ("", "\n")
        try:
            self._stream.write(f"{begin}hetu_fx: {text}{end}")
            self._stream.flush()
        except (OSError, ValueError):  # a stream that was closed is no reason to stop the work
            self._told = False
