"""What a forward takes from its process while it is traced, and what it does there once that it would do in each call.

It takes environment variables, clocks, Python's random numbers; it prints, and stops at breakpoints.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast
from unittest import mock

from hetu_fx.errors import CaptureError
from hetu_fx.graph.numbers import CLOCKS
from hetu_fx.program.code_reads import is_of_python, is_own_file
from hetu_fx.program.reads import Read


class _Variables:
    """The environment's variables as attributes."""

    def __getattr__(self, name: str) -> str:
        """Return the value of a variable."""
        if name not in os.environ:
            raise AttributeError(name)
        return os.environ[name]


_VARIABLES = _Variables()


class _Output:
    """Standard output, with a note of who writes to it."""

    def __init__(self, output: TextIO, note: Callable[[FrameType], None]) -> None:
        self._output, self._note = output, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

    def write(self, text: str) -> int:
        """Write a text, as it would be written."""
        self._note(sys._getframe(1))
        return self._output.write(text)


class Surroundings:
    """Notes what is taken; for one capture.

    Attributes:
        found: the environment variables that the user's own functions read, by their names.
        clocks: the functions of `time` that they call.
        drawn: the modules whose random numbers were drawn, which a graph would repeat.
        ran_once: lines of the user's that print, or stop at a breakpoint.
    """

    def __init__(self) -> None:
        self.found: dict[str, Read] = {}
        self.clocks: set[str] = set()
        self.drawn: list[str] = []
        self.ran_once: dict[str, None] = {}
        self._thread = threading.get_ident()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is taken inside, in this thread."""
        before = _random_states()
        kind: Any = type(os.environ)
        get: Callable[..., str] = kind.__getitem__

        def getting(environment: Any, name: str) -> str:
            if threading.get_ident() == self._thread and isinstance(name, str) and _is_asked_by_the_user():
                self.found[name] = Read(f"environment variable {name!r}", _VARIABLES, name)
            return get(environment, name)

        def stopping(*args: Any, **kwargs: Any) -> Any:
            self._note_line(sys._getframe(1))
            return stop(*args, **kwargs)

        stop = sys.breakpointhook
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(kind, "__getitem__", getting))
            stack.enter_context(redirect_stdout(cast(TextIO, _Output(sys.stdout, self._note_line))))
            stack.enter_context(mock.patch.object(sys, "breakpointhook", stopping))
            for name in CLOCKS:
                stack.enter_context(mock.patch.object(time, name, self._noting(name, getattr(time, name))))
            yield
        self.drawn = [name for name, state in _random_states().items() if before.get(name) != state]

    def _noting(self, name: str, clock: Callable[[], float]) -> Callable[[], float]:
        def reading() -> float:
            if threading.get_ident() == self._thread and is_own_file(sys._getframe(1).f_code.co_filename):
                self.clocks.add(name)
            return clock()

        reading.__name__ = name
        return reading

    def _note_line(self, frame: FrameType) -> None:
        if threading.get_ident() == self._thread and is_own_file(frame.f_code.co_filename):
            self.ran_once[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] = None

    @property
    def told(self) -> str:
        """Return what to tell of lines that a graph does not run again; empty if there are none."""
        if not self.ran_once:
            return ""
        return (
            f"{', '.join(self.ran_once)}: the forward prints, or stops at a breakpoint, which it does only while the "
            f"model is captured, where tensors have no values; the captured graph does neither\nhint: see what a "
            f"submodule makes by model.hetu.observe(name, print), or call the model inside `with model.hetu.whole():`, "
            f"which runs the forward as it is"
        )

    def check(self) -> None:
        """Raise CaptureError if random numbers were drawn."""
        if self.drawn:
            raise CaptureError(
                f"the forward draws random numbers of {' and '.join(self.drawn)}, which a captured graph would repeat "
                f"in every step; draw them with torch (torch.rand), pass them in as inputs, or use "
                f'hetu_fx.auto_parallelize(..., capture="eager")'
            )


def _is_asked_by_the_user() -> bool:
    """Tell whether the innermost function that is neither ours nor Python's own is the user's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and is_of_python(frame.f_code.co_filename):
        frame = frame.f_back
    return is_own_file(frame.f_code.co_filename)


def _random_states() -> dict[str, bytes]:
    states = {"random": pickle.dumps(random.getstate())}
    if "numpy.random" in sys.modules:
        states["numpy.random"] = pickle.dumps(sys.modules["numpy.random"].get_state())
    return states
