"""What a forward takes from its process while it is traced: environment variables, clocks, Python's random numbers."""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
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


class Surroundings:
    """Notes what is taken; for one capture.

    Attributes:
        found: the environment variables that the user's own functions read, by their names.
        clocks: the functions of `time` that they call.
        drawn: the modules whose random numbers were drawn, which a graph would repeat.
    """

    def __init__(self) -> None:
        self.found: dict[str, Read] = {}
        self.clocks: set[str] = set()
        self.drawn: list[str] = []
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

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(kind, "__getitem__", getting))
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
