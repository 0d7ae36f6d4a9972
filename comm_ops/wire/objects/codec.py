"""Values as bytes and back, without pickle: a JSON text of values and their kinds, then raw bytes.

A value is told as JSON where that has it: text, finite numbers, True, False and None. Any other is a list, which begins
with the number of its kind among those that the message names and goes on with its parts; `kinds` has what these are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from types import NoneType
from typing import Any

from hetu_fx.base.documents import MOST_BYTES, parse_json, told_as_damaged
from hetu_fx.comm_ops.wire.objects.kinds import TELLABLE, Kind, Parts, find_kind, kind_of_type
from hetu_fx.errors import CommError, StateError

MOST_DEPTH = 100
"""Of values inside values."""

_MOST_INT = 1 << 63
_SIZE_BYTES = 8
_PLAIN = frozenset({str, bool, NoneType})
_BYTES, _AGAIN, _KNOWN = "b", "=", "@"
_NOTHING: Mapping[Any, Any] = {}


def write(value: Any, names: Mapping[int, str] = _NOTHING) -> bytes:
    """Return a value as bytes.

    Args:
        value: of the kinds in `kinds`, whatever it has inside.
        names: by `id`, of objects that the reader has: they are told by name alone.

    Raises:
        StateError: something in it has no kind; names its type and where it is.
    """
    writer = _Writer(names)
    try:
        told = writer.told(value)
    except _NotTellable as found:
        raise StateError(str(found)) from None
    text = json.dumps([[(kind.name, *kind.labels) for kind in writer.kinds], told], separators=(",", ":")).encode()
    data = b"".join((len(text).to_bytes(_SIZE_BYTES), text, *writer.blobs))
    if len(data) > MOST_BYTES:
        raise StateError(f"a value of {len(data)} bytes cannot be told to other ranks, which take {MOST_BYTES} at most")
    return data


def decode(data: bytes, where: str, known: Mapping[str, Any] = _NOTHING) -> Any:
    """Return the value of bytes that `write` returned, or a stranger has made up.

    Args:
        data: the bytes.
        where: they are from, for errors.
        known: by name, the objects that the writer told by name.

    Raises:
        CommError: the bytes are of no value.
        HetuFxError: what the check of a class raises.
    """
    with told_as_damaged(where, CommError):
        end = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES])
        kinds, told = parse_json(data[_SIZE_BYTES:end], where, CommError)
        reader = _Reader([_checked(*kind) for kind in kinds], data, end, known)
        value = reader.made(told)
        if reader.place != len(data):
            raise ValueError(f"{len(data)} bytes, of which {reader.place} are read")
        return value


def _checked(name: str, *labels: str) -> Kind:
    kind = find_kind(name)
    if kind.labels != labels:
        raise ValueError(f"{name} has {', '.join(labels)} there, {', '.join(kind.labels)} here")
    return kind


class _NotTellable(Exception):
    """A value that cannot be told; `path` leads to it, from the inside out."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.path: list[str] = []

    def __str__(self) -> str:
        place = "".join(reversed(self.path))
        return (
            f"{self.what} cannot be told to other ranks{place and f'; it is at {place} in what was to be told'}\n"
            f"hint: {TELLABLE} can; tell what the value consists of"
        )


class _Writer:
    """What is told in one message so far: kinds in order, raw bytes, and objects that may occur again."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.kinds: dict[Kind, int] = {}
        self.blobs: list[bytes] = []
        self._names, self._shared = names, dict[int, int]()
        self._depth = 0

    def told(self, value: Any) -> Any:
        cls: type = type(value)
        if cls in _PLAIN or (cls is int and -_MOST_INT < value < _MOST_INT) or (cls is float and isfinite(value)):
            return value
        key = id(value)
        if key in self._names:
            return [_KNOWN, self._names[key]]
        if key in self._shared:
            return [_AGAIN, self._shared[key]]
        if cls is bytes:
            self.blobs.append(value)
            return [_BYTES, len(value)]
        return self._apart(value, kind_of_type(cls))

    def _apart(self, value: Any, kind: Kind | None) -> list[Any]:
        if kind is None:
            raise _NotTellable(f"an object of type {type(value).__module__}.{type(value).__qualname__}")
        if self._depth == MOST_DEPTH:
            raise _NotTellable(f"what is nested deeper than {MOST_DEPTH} times")
        try:
            parts = kind.apart(value)
        except TypeError as problem:
            raise _NotTellable(str(problem)) from None
        made: list[Any] = [self.kinds.setdefault(kind, len(self.kinds))]
        self._depth += 1
        try:
            for part in parts:
                made.append(self.told(part))
        except _NotTellable as found:
            found.path.append(_label(kind, parts, len(made) - 1))
            raise
        self._depth -= 1
        if kind.is_shared:
            self._shared[id(value)] = len(self._shared)
        return made


def _label(kind: Kind, parts: Parts, place: int) -> str:
    """Name a part of a value: `.field`, `[3]`, `['key']`."""
    if kind.labels:
        return f".{kind.labels[place]}"
    return f"[{repr(parts[place - place % 2])[:60] if kind.name == 'dict' else place}]"


class _Reader:
    """What is read of one message so far; raw bytes are read up to `place`."""

    def __init__(self, kinds: list[Kind], data: bytes, place: int, known: Mapping[str, Any]) -> None:
        self.place = place
        self._kinds, self._data, self._known = kinds, data, known
        self._shared: list[Any] = []

    def made(self, told: Any) -> Any:
        if type(told) is not list:
            if type(told) is dict:
                raise ValueError("an object of JSON, of which no kind is")
            return told
        head = told[0]
        if type(head) is not int:
            return self._special(*told)
        kind = self._kinds[_place(head)]
        value = kind.made([self.made(part) for part in told[1:]])
        if kind.is_shared:
            self._shared.append(value)
        return value

    def _special(self, head: str, what: Any) -> Any:
        if head == _KNOWN:
            return self._known[what]
        if head == _AGAIN:
            return self._shared[_place(what)]
        if head != _BYTES:
            raise ValueError(f"{head!r} is nothing that ranks tell each other")
        start, self.place = self.place, self.place + _place(what)
        return self._data[start : self.place]


def _place(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is below 0")
    return number
