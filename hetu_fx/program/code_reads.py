"""Find what the user's own functions read besides their arguments.

Globals, closures and defaults are in their code. Environment variables, clocks and Python's random numbers are watched
while a forward is traced, and what it does then that it would do in each call: it prints, or stops at a breakpoint.
"""

from __future__ import annotations

import datetime
import dis
import os
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from inspect import getattr_static
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TextIO, cast
from unittest import mock

from torch import nn
from torch.autograd import Function

from hetu_fx.errors import CaptureError
from hetu_fx.graph.numbers import CLOCKS, random_states
from hetu_fx.graph.tracing.contents import PLAIN, frozen
from hetu_fx.program.reads import Access, Read

_STDLIB = sysconfig.get_path("stdlib")
_PACKAGES = tuple({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})
# An environment may stand on others: a system's packages, a user's own, folders that a .pth file names.
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_LOOK_UPS, _NO_STEPS = ("LOAD_GLOBAL", "LOAD_NAME"), ("PUSH_NULL", "CACHE")
_HERE = __file__.rpartition("/program/")[0]


class CodeReads:
    """Collects what functions may read besides their arguments; not of functions of installed packages.

    Args:
        reach: told every object that is found, and what it is.

    Attributes:
        found: plain values and functions, by where they are.
        clocks: where globals and what is in them are clocks, and under which names.
        asks_classes: a function looks up `type`, other than for its own `type(self)`.
    """

    def __init__(self, reach: Callable[[Any, str], None]) -> None:
        self._reach = reach
        self._seen: set[int] = set()
        self._looked_into: set[tuple[int, frozenset[str]]] = set()
        self.found: dict[tuple[int, str], Access] = {}
        self.clocks: list[tuple[dict[str, Any], str]] = []
        self.asks_classes = False
        self._memos: dict[int, tuple[Any, int]] = {}

    def look_at_class(self, kind: type) -> None:
        """Look at the functions of a class and of those that it is made from, up to torch's."""
        for one in kind.__mro__:
            if one is nn.Module or one is object:
                return
            for value in vars(one).values():
                self.inspect_function(getattr(value, "fget", getattr(value, "__func__", value)), kind)

    def inspect_function(self, function: Any, kind: type | None = None) -> None:
        """Look at a function, and at those that it calls; as a method it may read of its class (`kind`)."""
        if isinstance(function, MethodType):
            owner, function = function.__self__, function.__func__
            kind = owner if isinstance(owner, type) else type(owner)
        if _remembers(function) and id(function) not in self._memos:
            self._memos[id(function)] = function, function.cache_info().misses
            function = function.__wrapped__
        if not isinstance(function, FunctionType):
            return
        own = is_own_file(function.__code__.co_filename)
        if own and kind is not None and _asks_its_class(function.__code__):
            self._look_into(kind, _names(function.__code__))
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if not _is_empty(cell):
                self._found(cell, "cell_contents", cell.cell_contents, f"{name!r} around {_place(function)}", own)
        if own:
            self._found(function, "__dict__", vars(function), f"attributes of {_place(function)}", own)
            self.asks_classes = self.asks_classes or _asks_classes(function.__code__)
            defaults = _defaults(function)
            for name, value in defaults.items():
                self._found(defaults, name, value, f"default of {name!r} of {_place(function)}", own)
            for name in sorted(_names(function.__code__)):
                if name in function.__globals__:
                    value = function.__globals__[name]
                    if value is datetime and "datetime" in _names(function.__code__):
                        self.clocks.append((vars(datetime), "datetime"))
                    elif _is_clock(value):
                        self.clocks.append((function.__globals__, name))
                    self._found(function.__globals__, name, value, f"global {name!r} of {_file(function)}", own)
                    self._look_into(value, _names(function.__code__))

    def forget(self) -> None:
        """Let functions that remember what they return (`functools.cache`) forget it, if a trace has called them."""
        for function, misses in self._memos.values():
            if function.cache_info().misses != misses:
                function.cache_clear()

    def _look_into(self, value: Any, names: frozenset[str]) -> None:
        """Look at what code that has these names may read of a module or of a class of the user's."""
        if not _is_own_space(value) or (id(value), names) in self._looked_into:
            return
        self._looked_into.add((id(value), names))
        for name in sorted(names & {name for space in _spaces(value) for name in space}):
            item, owner = getattr(value, name, None), vars(value) if isinstance(value, ModuleType) else value
            self._found(owner, name, item, f"{value.__name__}.{name}", True)
            self._look_into(item, names)

    def _found(self, owner: Any, name: str, value: Any, label: str, own: bool) -> None:
        if isinstance(value, FunctionType | MethodType) or _remembers(value):
            self.inspect_function(value)
        if isinstance(value, type) and issubclass(value, Function):  # its backward is the graph's, too
            for method in (value.forward, value.setup_context, value.backward):
                self.inspect_function(method)
        self.asks_classes = self.asks_classes or (own and value is type)
        if not own or isinstance(value, type | ModuleType):
            return
        self._reach(value, label)
        if isinstance(value, (*PLAIN, *_CONTAINERS, FunctionType, MethodType)) or frozen(value) is not value:
            self.note(owner, name, value, label)

    def note(self, owner: Any, name: str, value: Any, label: str) -> None:
        """Know that a value is read."""
        if (id(owner), name) not in self.found:
            self.found[id(owner), name] = Access(label, owner, name, owner, value, frozen(value))


def _is_clock(value: Any) -> bool:
    of_time = isinstance(value, BuiltinFunctionType) and value.__module__ == "time" and value.__name__ in CLOCKS
    return of_time or value is datetime.datetime


def _remembers(value: Any) -> bool:
    """Tell whether a value is a function that keeps what it returns; objects that import on demand are left alone."""
    return all(getattr_static(value, name, None) for name in ("cache_info", "cache_clear", "__wrapped__"))


def _names(code: CodeType) -> frozenset[str]:
    """Return the names that code and what is nested in it looks up."""
    return frozenset(
        (*code.co_names, *(name for one in code.co_consts if isinstance(one, CodeType) for name in _names(one)))
    )


def _asks_classes(code: CodeType) -> bool:
    if "type" not in _names(code):
        return False
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code) if step.opname not in _NO_STEPS]
    for (look_up, name), (load, of), (call, count) in zip(steps, steps[1:], steps[2:], strict=False):
        is_own = load.startswith("LOAD_FAST") and of == "self" and call in ("PRECALL", "CALL") and count == 1
        if look_up in _LOOK_UPS and name == "type" and not is_own:
            return True
    return any(_asks_classes(one) for one in code.co_consts if isinstance(one, CodeType))


def _asks_its_class(code: CodeType) -> bool:
    return not {"type", "__class__", "cls"}.isdisjoint((*_names(code), *code.co_varnames))


def _defaults(function: FunctionType) -> dict[str, Any]:
    """Return the default arguments that are not plain, by the names of their parameters."""
    names, values = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__ or ()
    every = {**dict(zip(reversed(names), reversed(values), strict=False)), **(function.__kwdefaults__ or {})}
    return {name: value for name, value in every.items() if not isinstance(value, PLAIN)}


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def is_own_file(path: str) -> bool:
    """Tell whether code in a file is the user's: not of an installed package, of Python or of hetu_fx."""
    return not (path.startswith((_STDLIB, _HERE)) or _is_of_a_package(path))


def is_of_python(path: str) -> bool:
    """Tell whether code in a file is of Python's own library."""
    return path.startswith((_STDLIB, "<")) and not _is_of_a_package(path)


def _is_of_a_package(path: str) -> bool:
    return path.startswith(_PACKAGES) or any(folder in path for folder in _INSTALLED)


def _is_own_space(value: Any) -> bool:
    """Tell whether a value is a module or a class of the user's."""
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    return path is not None and is_own_file(path)


def _spaces(value: ModuleType | type) -> Iterator[Mapping[str, Any]]:
    """Yield where a module or a class has what it has, torch's classes left out."""
    return map(vars, filter(_is_own_space, value.__mro__ if isinstance(value, type) else (value,)))


def _file(function: FunctionType) -> str:
    return function.__code__.co_filename.rpartition("/")[2]


def _place(function: FunctionType) -> str:
    return f"{function.__qualname__} ({_file(function)}:{function.__code__.co_firstlineno})"


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
    """Notes what is taken, and what is done once that would be done in each call; for one capture.

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
        before = random_states()
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
        self.drawn = [name for name, state in random_states().items() if before.get(name) != state]

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
                f"in every step\nhint: draw them with torch (torch.rand), pass them in as inputs, or use "
                f'hetu_fx.auto_parallelize(..., capture="eager")'
            )


def _is_asked_by_the_user() -> bool:
    """Tell whether the innermost function that is neither ours nor Python's own is the user's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and is_of_python(frame.f_code.co_filename):
        frame = frame.f_back
    return is_own_file(frame.f_code.co_filename)
