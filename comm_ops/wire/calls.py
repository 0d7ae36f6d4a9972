"""What this process does, for a message to the others: its calls of a parallel model, and where it is now.

Where it is stands on the stack of the thread that called: nothing is noted on the way into a call but its name, its
place in the user's own code, and the time. Another thread's stack is read in one go (`_stack`).
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat, takewhile
from operator import attrgetter, call, methodcaller
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from hetu_fx.base.user_frames import is_inner, is_ours, user_frame

if TYPE_CHECKING:
    from hetu_fx.comm_ops.wire.standings import Wait

_COLLECTIVES = os.path.join(os.path.dirname(torch.__file__), "distributed", "distributed_c10d.py")
_SHOWN_CHARACTERS = 80
_MOST_FRAMES = 1000
_READ = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")  # no number before the first line


@dataclass(slots=True)
class LastCall:
    """The last call that was noted, the thread that makes such calls, and the communications that are under way."""

    name: str = ""
    place: tuple[str, int] | None = None
    at: float = 0.0
    steps: int = 0
    thread: int | None = None
    waits: list[Wait] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What was called, and where: "loss.backward() at train.py:40"."""
        return self.name + ("" if self.place is None else f" at {os.path.basename(self.place[0])}:{self.place[1]}")


last = LastCall()


def note(name: str, *, is_step: bool = False) -> None:
    """Remember a call in which ranks will wait for each other; `is_step`: it is counted, in the thread of the user."""
    frame = user_frame(sys._getframe(1))
    last.name, last.at = name, perf_counter()
    last.place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    if is_step:
        last.steps += 1
        last.thread = threading.get_ident()


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where a thread is: in a call of ours (its name, the same on all ranks) or in the user's code, and at which line.

    A backward counts as ours while it runs.
    """

    call: str
    place: str


def whereabouts() -> CallSite:
    """Tell where the thread is that calls parallel models; from any thread."""
    thread = last.thread or threading.main_thread().ident
    return _whereabouts(_stack(thread))


def is_in_collective() -> bool:
    """Tell whether that thread is in a collective of torch's that the user's own code has called."""
    stack = _stack(last.thread or threading.main_thread().ident)
    inside = list(takewhile(attrgetter("is_inner"), stack))
    return any(line.file == _COLLECTIVES for line in inside) and not any(line.is_ours for line in inside)


def user_line_of_error(error: BaseException | None) -> str:
    """Name the user's line that an error has passed last."""
    stack = list(_trace(None if error is None else error.__traceback__))
    return _whereabouts(stack[::-1]).place if stack else ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that a thread is at, in one of the functions on its stack."""

    file: str
    number: int
    function: str

    @property
    def is_ours(self) -> bool:
        """Whether it is in a call of this package, or in one of torch's in which its callers wait."""
        return is_ours(self.file, self.function)

    @property
    def is_inner(self) -> bool:
        """Whether it is of a library below the user's code, or of ours."""
        return is_inner(self.file, self.function)

    @property
    def is_of_script(self) -> bool:
        """Whether it is in the file that python was started with."""
        return self.file == getattr(sys.modules.get("__main__"), "__file__", None)

    @property
    def short(self) -> str:
        """It as people write it."""
        return f"{os.path.basename(self.file)}:{self.number}"


Stack = list[Line]  # the innermost first


def _trace(trace: TracebackType | None) -> Iterator[Line]:
    while trace is not None:
        code = trace.tb_frame.f_code
        yield Line(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next


def _stack(thread: int | None) -> Stack:
    """Return the lines that a thread is at, the innermost first; none where it has ended.

    All is read inside one call of a function in C, during which no other thread runs: were frames walked, or their code
    read, one by one, the thread could go on in between, and python 3.11 would then give frames that are freed already.
    `faulthandler` reads stacks in one go too, but of threads as well that a library in C++ is just beginning: it has
    ended processes.
    """
    innermost = map(methodcaller("get", thread), map(call, (sys._current_frames,)))
    read: list[tuple[str, int | None, str]] = []
    with suppress(AttributeError):  # of the None that the outermost leads to
        read.extend(map(_READ, accumulate(chain(innermost, repeat("f_back", _MOST_FRAMES)), getattr)))
    return [Line(file, number or 0, function) for file, number, function in read]


def _whereabouts(stack: Stack) -> CallSite:
    entry = next((i for i in reversed(range(len(stack))) if stack[i].is_ours), None)
    outside = stack if entry is None else stack[entry:]  # what the user's code has called, and that code
    call = "" if entry is None else f"{stack[entry].function} ({os.path.basename(stack[entry].file)})"
    return CallSite(call, _shown([line for line in outside if not line.is_inner]))


def _shown(lines: Stack) -> str:
    """Name the innermost line outside of torch and of ours, and the script's own where that is another."""
    if not lines:
        return ""
    first = lines[0]
    code = linecache.getline(first.file, first.number).strip()[:_SHOWN_CHARACTERS]
    script = next((line for line in lines if line.is_of_script), first)
    via = f", from {script.short}" if script is not first and not script.file.startswith("<") else ""
    return first.short + (f" ({code})" if code else "") + via
