"""What long work says on stderr while it lasts: nothing of what is soon over, and nothing on stdout.

On a terminal a line that is written anew each second, elsewhere a line every ten seconds; with how much is done, and
on a terminal a bar, where the work tells that. The first process of a host speaks for all. HETU_FX_PROGRESS=0 says
nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TextIO

from hetu_fx.base.per_rank import is_one_of_many
from hetu_fx.base.words import share_text

VARIABLE = "HETU_FX_PROGRESS"
PATIENCE_SECONDS = 2.0
"""What is over by then is not told on a terminal."""

EVERY_SECONDS = 10.0
"""How often a log is told, and after how long first."""

_BAR = 20  # letters of a bar


class Tell(Protocol):
    """Takes how far work has come: what is done now, how many parts are done, and of how many (0: nobody knows)."""

    def __call__(self, now: str, done: int = 0, total: int = 0, /) -> None:
        """Take note of it."""


def nobody(now: str, done: int = 0, total: int = 0, /) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How a stream is told: after how many seconds, how often then, and whether each line replaces the one before."""

    first_seconds: float
    every_seconds: float
    replaces: bool


TERMINAL = Rhythm(PATIENCE_SECONDS, 1.0, True)
LOG = Rhythm(EVERY_SECONDS, EVERY_SECONDS, False)


@contextmanager
def telling(
    what: str, stream: TextIO | None = None, rhythm: Rhythm | None = None, *, speaker: bool | None = None
) -> Iterator[Tell]:
    """Say what is done for as long as a block lasts, if it lasts; `what` is like "capturing the model".

    Yields what the block may tell how far it has come. `speaker` is whether this process speaks for its host; left out:
    the first one does.
    """
    if not speaks(speaker):
        yield nobody
        return
    stream = sys.stderr if stream is None else stream
    line = _Line(what, stream, rhythm or (TERMINAL if stream.isatty() else LOG))
    ended = threading.Event()
    speaking = threading.Thread(target=line.tell_until, args=(ended.wait,), daemon=True, name="hetu_fx progress")
    speaking.start()
    try:
        yield line.note
    finally:
        ended.set()
        speaking.join()
        line.end()


def speaks(speaker: bool | None = None) -> bool:
    """Tell whether this process is the one of its host that speaks, and is wanted to; ranks that are threads do not."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0" and not is_one_of_many()
    return os.environ.get(VARIABLE, "1") != "0" and (is_first if speaker is None else speaker)


@dataclass(frozen=True, slots=True)
class _Standing:
    """How far work has come."""

    now: str = ""
    done: int = 0
    total: int = 0

    def text(self, *, bar: bool) -> str:
        """Return it as it stands after the name of the work: `: block 1, 3 of 8 (38 %)`, perhaps with a bar."""
        parts = f"{self.done} of {self.total} ({share_text(self.done / self.total)})" if self.total else ""
        told = ", ".join(filter(None, [self.now, parts]))
        filled = _BAR * self.done // self.total if bar and self.total else 0
        drawn = f" [{'#' * filled}{'.' * (_BAR - filled)}]" if bar and self.total else ""
        return f": {told}{drawn}" if told else ""


class PhaseSeconds:
    """Seconds of this process by what it did; phases of one name add up.

    Attributes:
        seconds: by the name of the phase, in the order in which they began first.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count what is inside as this phase."""
        before, start = self.seconds.setdefault(name, 0.0), time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = before + time.perf_counter() - start


class _Line:
    """What is said of one piece of work."""

    def __init__(self, what: str, stream: TextIO, rhythm: Rhythm) -> None:
        self._what, self._stream, self._rhythm = what, stream, rhythm
        self._start, self._told, self._width = time.monotonic(), False, 0
        self._standing = _Standing()

    def note(self, now: str, done: int = 0, total: int = 0, /) -> None:
        """Take note of how far the work has come; it is said when it is time."""
        self._standing = _Standing(now, done, total)

    def tell_until(self, ends: Callable[[float], bool]) -> None:
        """Tell from time to time, until `ends`, which waits for so many seconds, says that it is over."""
        seconds = self._rhythm.first_seconds
        while not ends(seconds):
            self._write(f"{self._what}{self._standing.text(bar=self._rhythm.replaces)} ... {self._seconds} s")
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
        over = " " * (self._width - len(text)) if self._rhythm.replaces else ""  # what was longer before
        self._width = len(text)
        try:
            self._stream.write(f"{begin}hetu_fx: {text}{over}{end}")
            self._stream.flush()
        except (OSError, ValueError):  # a stream that was closed is no reason to stop the work
            self._told = False
