"""What this process does, for a message to the others: its calls of a parallel model, and where it is now.

Where it is stands on the stack of the thread that called: nothing is noted on the way into a call but its name, its
place in the user's own code, and the time.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from types import FrameType, TracebackType

_OURS = "hetu_fx"
_STARTERS = ("hetu_fx.launch", "hetu_fx.cli", "hetu_fx.emulate", "hetu_fx.demo")  # they run scripts, further out
_LIBRARIES = frozenset({"torch", *sys.stdlib_module_names}) - {"__main__"}
_ENGINE = "_engine_run_backward"  # of torch.autograd.graph: its callers wait in it for a backward
_SHOWN_CHARACTERS = 80


@dataclass(slots=True)
class LastCall:
    """The last call that was noted, and the thread that makes such calls."""

    name: str = ""
    place: tuple[str, int] | None = None
    at: float = 0.0
    steps: int = 0
    thread: int | None = None

    @property
    def text(self) -> str:
        """What was called, and where: "loss.backward() at train.py:40"."""
        return self.name + ("" if self.place is None else f" at {os.path.basename(self.place[0])}:{self.place[1]}")


last = LastCall()


def note(name: str, *, is_step: bool = False) -> None:
    """Remember a call in which ranks will wait for each other; `is_step`: it is counted, in the thread of the user."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_inner(frame):
        frame = frame.f_back
    last.name, last.at = name, perf_counter()
    last.place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    if is_step:
        last.steps += 1
        last.thread = threading.get_ident()


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a thread is: in a call of ours (its name, the same on all ranks) or in the user's code, and at which line.

    A backward counts as ours while it runs.
    """

    call: str
    place: str


def whereabouts() -> Whereabouts:
    """Tell where the thread is that calls parallel models; from any thread."""
    thread = last.thread or threading.main_thread().ident
    return _whereabouts(list(_stack(None if thread is None else sys._current_frames().get(thread))))


def place_of(error: BaseException | None) -> str:
    """Name the user's line that an error has passed last."""
    stack = list(_trace(None if error is None else error.__traceback__))
    return _whereabouts(stack[::-1]).place if stack else ""


Stack = list[tuple[FrameType, int]]  # frames and lines, the innermost first


def _stack(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _trace(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _whereabouts(stack: Stack) -> Whereabouts:
    entry = next((i for i in reversed(range(len(stack))) if _is_entry(stack[i][0])), None)
    outside = stack if entry is None else stack[entry:]  # what the user's code has called, and that code
    call = "" if entry is None else stack[entry][0].f_code.co_qualname
    return Whereabouts(call, _shown([(frame, line) for frame, line in outside if not _is_inner(frame)]))


def _is_entry(frame: FrameType) -> bool:
    return _is_ours(_module(frame)) or frame.f_code.co_name == _ENGINE


def _shown(frames: Stack) -> str:
    """Name the innermost line outside of torch and of ours, and the script's own where that is another."""
    if not frames:
        return ""
    frame, line = frames[0]
    code = linecache.getline(frame.f_code.co_filename, line).strip()[:_SHOWN_CHARACTERS]
    script = next(((f, n) for f, n in frames if _module(f) == "__main__"), (frame, line))
    is_other = script[0] is not frame and not script[0].f_code.co_filename.startswith("<")
    via = f", from {_short(*script)}" if is_other else ""
    return _short(frame, line) + (f" ({code})" if code else "") + via


def _short(frame: FrameType, line: int) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{line}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == _OURS and not module.startswith(_STARTERS)


def _is_inner(frame: FrameType) -> bool:
    """Tell whether a frame is of a library below the user's code, or of ours."""
    module = _module(frame)
    return module.partition(".")[0] in _LIBRARIES or module.startswith(_OURS)
