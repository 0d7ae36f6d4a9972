"""What is in objects that stay the same is compared with a copy of it."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy
import pytest

from hetu_fx.graph.tracing.contents import frozen, same

CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a list": ([1, {"a": 2}], lambda value: value[1].update(a=3)),
    "a queue": (deque([1.0]), lambda value: value.append(2.0)),
    "an array": (numpy.ones(3), lambda value: value.fill(2.0)),
    "an array in a list": ([numpy.ones(3)], lambda value: value[0].fill(2.0)),
    "a number of ctypes": (ctypes.c_double(1.0), lambda value: setattr(value, "value", 2.0)),
    "bytes that can be written": (bytearray(b"a"), lambda value: value.append(1)),
    "random numbers of Python": (random.Random(0), lambda value: value.random()),
    "random numbers of numpy": (numpy.random.default_rng(0), lambda value: value.random()),
    "the order of a dictionary": (OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "a count": (itertools.count(), next),
    "a cycle": (itertools.cycle([1.0, 3.0]), next),
    "an iterator of a list": (iter([1, 2]), next),
    "a map over an iterator": (map(abs, iter([1, 2])), next),
    "arguments of a partial function": (partial(max, [0]), lambda value: value.args[0].append(1)),
    "values of a thread": (threading.local(), lambda value: setattr(value, "scale", 2.0)),
    "a context variable": (ContextVar("scale", default=1.0), lambda value: value.set(2.0)),
}


@pytest.mark.parametrize(("value", "change"), CHANGES.values(), ids=CHANGES)
def test_a_copy_is_the_same_until_the_contents_change(value: Any, change: Callable[[Any], Any]) -> None:
    assert frozen(value) is not value
    copy = frozen(value)
    assert same(value, copy)
    assert same(copy, frozen(value))
    change(value)
    assert not same(value, copy)


@pytest.mark.parametrize("value", [(n for n in range(3)), SimpleQueue[int]()], ids=["a generator", "a simple queue"])
def test_what_does_not_show_how_far_it_is_is_never_the_same(value: Any) -> None:
    assert frozen(value) is not value
    assert not same(value, frozen(value))


def test_a_look_at_an_iterator_does_not_move_it() -> None:
    phases = itertools.cycle(iter([1.0, 3.0]))
    frozen(phases)
    assert [next(phases) for _ in range(3)] == [1.0, 3.0, 1.0]


@pytest.mark.parametrize("value", [1, "a", object(), print, numpy.ones, (1, print)], ids=range(6))
def test_what_cannot_change_is_its_own_copy(value: Any) -> None:
    assert frozen(value) is value


def test_arrays_of_unlike_shapes_or_formats_are_unlike() -> None:
    assert not same(numpy.zeros(2), frozen(numpy.zeros((2, 1))))
    assert not same(numpy.zeros(1, dtype="int64"), frozen(numpy.zeros(1, dtype="float64")))


class _Made:
    @classmethod
    def by_class(cls) -> None: ...

    def by_object(self) -> None: ...


def test_methods_are_the_same_for_one_function_of_one_object() -> None:
    one, other = _Made(), _Made()
    assert same(_Made.by_class, _Made.by_class)
    assert same(one.by_object, one.by_object)
    assert not same(one.by_object, other.by_object)
    assert not same(one.by_object, one.by_class)
    assert not same(one.by_object, None)
