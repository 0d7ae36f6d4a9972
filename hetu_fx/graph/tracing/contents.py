"""What is in values that may change while they stay the same objects: copies of it, and comparisons with these."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections import deque
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import is_
from queue import Queue, SimpleQueue
from types import MethodType
from typing import Any

import torch
from torch import Tensor

Space = dict[str, Any]
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_ITERATORS = ("builtins", "itertools")
"""Where classes come from whose objects move on when they are asked, and show how far they are by `__reduce_ex__`."""

_RANDOM = ("random", "numpy.random")
"""Where classes come from whose objects give random numbers."""


class _Absent:
    def __repr__(self) -> str:
        return "none"


ABSENT = _Absent()
"""Stands for the value of an attribute that is not there."""


@dataclass(frozen=True)
class RawMemory:
    """What an object has in memory: an array, a number of ctypes, or the state of a generator of random numbers.

    Attributes:
        kind: the class of the object.
        layout: format and shape; empty for a state.
        content: the bytes.
    """

    kind: type
    layout: tuple[Any, ...]
    content: bytes

    def __repr__(self) -> str:
        return f"{self.kind.__name__} of {self.content.hex()[:16]}"


@dataclass(frozen=True, eq=False)
class Inside:
    """What an object of Python's own library has in it: arguments, the values of a thread, how far an iterator is.

    Attributes:
        kind: the class of the object.
        content: to be compared; an `object()` where nothing shows it, which is the same as no other.
    """

    kind: type
    content: Any


def frozen(value: Any) -> Any:
    """Return a copy of what can change, and of such values in it, with the same objects in them; else the value."""
    match value:
        case dict():
            return {key: frozen(item) for key, item in value.items()}
        case list():
            return [frozen(item) for item in value]
        case deque():
            return deque(map(frozen, value), value.maxlen)
        case tuple():
            copies = tuple(map(frozen, value))
            return value if all(map(is_, value, copies)) else copies
        case set():
            return set(value)
        case partial():
            return Inside(partial, frozen((value.func, value.args, value.keywords)))
        case threading.local():
            return Inside(type(value), frozen(value.__dict__))
        case Queue():
            return Inside(type(value), frozen(value.queue))
        case ContextVar():
            return Inside(ContextVar, frozen(value.get(None)))
        case SimpleQueue() | Iterator() if type(value).__module__ in (*_ITERATORS, SimpleQueue.__module__):
            return Inside(type(value), _progress(value))
        case _:
            return _memory(value)


def same(value: Any, other: Any) -> bool:
    """Tell whether two values are the same to a graph: equal plain values, equal contents, else the same object.

    Either may be what `frozen` has made of one.
    """
    if value is other:
        return True
    match value:
        case dict():
            return (
                isinstance(other, dict)
                and len(value) == len(other)
                and (_are_identical(value, other) or _have_same(value, other))
            )
        case list() | tuple() | deque():
            return _kind(value) is _kind(other) and len(value) == len(other) and _are_same(value, other)
        case set() | frozenset():
            return isinstance(other, set | frozenset) and value == other
        case MethodType():  # each look-up makes another object
            is_method = isinstance(other, MethodType)
            return is_method and value.__self__ is other.__self__ and value.__func__ is other.__func__
    if type(value) is type(other) and isinstance(value, PLAIN):
        return repr(value) == repr(other)
    content, before = frozen(value), frozen(other)
    if isinstance(content, Inside) and isinstance(before, Inside):
        return content.kind is before.kind and same(content.content, before.content)
    return isinstance(content, RawMemory) and content == before


def _are_identical(value: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Tell whether dictionaries have the same objects in the same order: a config's thousand labels, at each step."""
    return all(map(is_, value, other)) and all(map(is_, value.values(), other.values()))


def _have_same(value: dict[Any, Any], other: dict[Any, Any]) -> bool:
    in_order = list(map(hash, value)) == list(map(hash, other))  # of keys that may be tensors
    return in_order and value.keys() == other.keys() and all(same(item, other[key]) for key, item in value.items())


def _are_same(values: Collection[Any], others: Collection[Any]) -> bool:
    """Tell whether values are the same one by one; most are the same objects."""
    return all(map(is_, values, others)) or all(map(same, values, others))


def _kind(value: Any) -> type | None:
    return next((kind for kind in (list, tuple, deque) if isinstance(value, kind)), None)


def _progress(iterator: Any) -> Any:
    """Return how far an iterator is, which does not move it; an object of its own where it does not show that."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return frozen(iterator.__reduce_ex__(2)[1:])
    except (TypeError, RuntimeError):
        return object()


def _memory(value: Any) -> Any:
    """Return what a value shows of its memory (by Python's buffer protocol), or its random state; else the value."""
    kind = type(value)
    if isinstance(value, (*PLAIN, Tensor, type)):
        return value
    if kind.__module__.startswith(_RANDOM) and not callable(value):
        return RawMemory(kind, (), pickle.dumps(value))
    try:
        with memoryview(value) as memory:
            return RawMemory(kind, (memory.format, memory.shape), memory.tobytes())
    except (TypeError, ValueError, BufferError):
        return value


def put(space: Space, name: str, value: Any) -> None:
    """Let an object have an attribute, or none."""
    if value is ABSENT:
        space.pop(name, None)
    else:
        space[name] = value
