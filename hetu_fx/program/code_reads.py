"""Find the globals and closed-over variables that the user's own functions read, in their code."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from hetu_fx.program.reads import PLAIN, Read

_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
_CONTAINERS = (list, tuple, dict, set, frozenset)
_HERE = __file__.rpartition("/program/")[0]


class CodeReads:
    """Collects what functions may read besides their arguments; not of functions of installed packages.

    Args:
        reach: told every object that is found, and what it is.

    Attributes:
        found: plain values and functions, by where they are.
    """

    def __init__(self, reach: Callable[[Any, str], None]) -> None:
        self._reach = reach
        self._seen: set[int] = set()
        self.found: dict[tuple[int, str], Read] = {}

    def look_at_class(self, kind: type) -> None:
        """Look at the functions of a class and of those that it is made from, up to torch's."""
        for one in kind.__mro__:
            if one is nn.Module or one is object:
                return
            for value in vars(one).values():
                self.look_at(getattr(value, "fget", getattr(value, "__func__", value)))

    def look_at(self, function: Any) -> None:
        """Look at a function, and at those that it calls."""
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or id(function) in self._seen:
            return
        self._seen.add(id(function))
        own = not function.__code__.co_filename.startswith((*_LIBRARIES, _HERE))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if not _is_empty(cell):
                self._found(cell, "cell_contents", cell.cell_contents, f"{name!r} around {_place(function)}", own)
        if own:
            for name in sorted(_names(function.__code__)):
                if name in function.__globals__:
                    value = function.__globals__[name]
                    self._found(function.__globals__, name, value, f"global {name!r} of {_file(function)}", own)
                    if isinstance(value, ModuleType) and _is_own_module(value):
                        self._of_module(value, _names(function.__code__))

    def _of_module(self, module: ModuleType, names: set[str]) -> None:
        for name in sorted(names & vars(module).keys()):
            self._found(vars(module), name, vars(module)[name], f"{module.__name__}.{name}", True)

    def _found(self, owner: Any, name: str, value: Any, label: str, own: bool) -> None:
        if isinstance(value, FunctionType | MethodType):
            self.look_at(value)
        if not own or isinstance(value, type | ModuleType):
            return
        self._reach(value, label)
        if isinstance(value, (*PLAIN, *_CONTAINERS, FunctionType, MethodType)):
            self.found[id(owner), name] = Read(label, owner, name)


def _names(code: CodeType) -> set[str]:
    """Return the names that code and what is nested in it looks up."""
    return {*code.co_names, *(name for one in _nested(code) for name in _names(one))}


def _nested(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _is_own_module(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return path is not None and not path.startswith((*_LIBRARIES, _HERE))


def _file(function: FunctionType) -> str:
    return function.__code__.co_filename.rpartition("/")[2]


def _place(function: FunctionType) -> str:
    return f"{function.__qualname__} ({_file(function)}:{function.__code__.co_firstlineno})"
