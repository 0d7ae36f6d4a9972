"""Keeps captures in a folder, for all processes of one run of tests.

What a capture depends on is told as text, which is equal in all processes of the same sources. What has no such text,
an object that is only the same as itself, is not kept. One process captures while others wait for what it keeps.
"""

from __future__ import annotations

import fcntl
import hashlib
import marshal
import os
import pickle
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch

from benchmarks.mutants.mutant import VARIABLE as MUTANT
from hetu_fx.graph.graph import Graph
from tests.ranks import stored_graphs

FOLDER = "HETU_FX_TESTS_CAPTURES"
"""The variable that names the folder; without it nothing is kept."""

_TEXTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_BY_NAME = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


class OnlyItselfError(Exception):
    """A value is equal to itself only, or nobody knows to what else."""


@dataclass(frozen=True)
class Identity:
    """Stands for an object in the process that has it."""

    number: int


@dataclass(frozen=True)
class Stored:
    """A capture as it is kept: the graph, and what its forward has read, as texts."""

    source: Graph
    read: Set[str]


@dataclass(frozen=True)
class Place:
    """Where captures of one key are kept: the last one."""

    path: Path

    def take(self) -> Stored | None:
        """Return what is kept, if it names nothing that only the process has which kept it."""
        with suppress(FileNotFoundError, *stored_graphs.CANNOT_BE_READ):
            read, written = pickle.loads(self.path.read_bytes())
            return Stored(stored_graphs.from_bytes(written), read)
        return None

    def keep(self, source: Graph, read: Iterable[Any]) -> None:
        """Keep a capture, if another process can have it."""
        with suppress(OnlyItselfError, *stored_graphs.CANNOT_BE_WRITTEN):
            content = pickle.dumps((frozenset(map(told, read)), stored_graphs.to_bytes(source)))
            beside = self.path.with_suffix(f".{os.getpid()}")
            beside.write_bytes(content)
            beside.replace(self.path)


@contextmanager
def place_of(key: tuple[Any, ...]) -> Iterator[Place | None]:
    """Give the place of a key, which no other process has meanwhile; None if there is no such place."""
    if FOLDER not in os.environ:
        yield None
        return
    try:
        text = told((*key, os.environ.get(MUTANT)))
    except OnlyItselfError:
        yield None
        return
    path = Path(os.environ[FOLDER], hashlib.sha256(text.encode()).hexdigest()[:32])
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Place(path)


def told(value: Any) -> str:
    """Return a text of a value that is equal in all processes.

    Raises:
        OnlyItselfError: there is none.
    """
    if isinstance(value, Enum):
        return f"{told(type(value))}.{value.name}"
    match value:
        case _ if isinstance(value, _TEXTS):
            return repr(value)
        case tuple() if type(value) is tuple:
            return f"({','.join(map(told, value))})"
        case frozenset():
            return f"{{{','.join(sorted(map(told, value)))}}}"
        case type():
            return f"{value.__module__}.{value.__qualname__}"
        case CodeType():
            return hashlib.sha256(marshal.dumps(value, 2)).hexdigest()
        case FunctionType():
            parts = value.__defaults__, tuple((value.__kwdefaults__ or {}).items()), _closure(value)
            return f"{value.__module__}.{value.__qualname__}:{told(value.__code__)}{told(parts)}"
        case property():
            return f"property{told((value.fget, value.fset, value.fdel))}"
        case _ if isinstance(value, _BY_NAME):
            owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
            return f"{told(owner) if isinstance(owner, type) else value.__module__}:{value.__qualname__}"
    raise OnlyItselfError(f"{type(value).__name__}: {value!r:.200}")


def _closure(function: FunctionType) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())
