"""Values as bytes and back, without pickle: a JSON text of values and their kinds, then raw bytes.

A value is told as JSON where that has it: text, finite numbers, True, False and None. Any other is a list, which begins
with the number of its kind among those that the message names and goes on with its parts. Which kinds there
are, and their parts, say a table of types and a rule for classes. Reading makes values of these and no others.

Which values ranks tell each other, and what each of them consists of: a table of types, and a rule for classes. Reading
makes values of these kinds and no others. It imports nothing, and calls what is in this file and the checks
(`__post_init__`) of hetu_fx's own frozen classes.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetu_fx.base.documents import MOST_BYTES, parse_json, told_as_damaged
from hetu_fx.comm_ops.wire.flat import dense
from hetu_fx.errors import CommError, StateError

Parts = Sequence[Any]
OURS = "hetu_fx."

TELLABLE = (
    "numbers, text, bytes, None, lists, tuples, dicts, sets, paths, enums, dense tensors, torch's dtypes and devices, "
    "and hetu_fx's own frozen classes"
)


@dataclass(frozen=True, eq=False)
class Kind:
    """How the values of one type are told.

    Attributes:
        name: in a message; of a class `MODULE:NAME`.
        apart: returns a value's parts, each told by its own kind. Raises TypeError for a value that cannot be told.
        made: returns the value of its parts, which a stranger may have written; raises what `told_as_damaged` knows.
        labels: the parts' names; (): they are counted.
        is_shared: a value that occurs in several places of a message is told once.
    """

    name: str
    apart: Callable[[Any], Parts]
    made: Callable[[Parts], Any]
    labels: tuple[str, ...] = ()
    is_shared: bool = False


def _of_pairs(parts: Parts) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _of_bits(parts: Parts) -> float:
    (bits,) = parts
    number: float = struct.unpack(">d", int(bits, 16).to_bytes(8, "big"))[0]
    return number


def _tensor_apart(x: Tensor) -> Parts:
    if x.layout is not torch.strided or x.is_quantized or x.is_meta:
        raise TypeError(f"a tensor of layout {x.layout} and {x.dtype} on {x.device}")
    return x.dtype, tuple(x.shape), dense(x).cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _of_memory(parts: Parts) -> Tensor:
    dtype, shape, data = parts
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"a tensor of shape {shape} and {dtype} has {len(data)} bytes")
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_OF_NUMPY = tuple(np.dtype(code).type for code in "?bBhHiIlLqQefdFD")  # without those wider than Python's

_KINDS: Mapping[type, Kind] = {
    tuple: Kind("tuple", lambda value: value, tuple),
    list: Kind("list", lambda value: value, list),
    dict: Kind("dict", lambda value: tuple(chain.from_iterable(value.items())), _of_pairs),
    set: Kind("set", tuple, set),
    frozenset: Kind("frozenset", tuple, frozenset),
    int: Kind("int", lambda value: (hex(value),), lambda parts: int(parts[0], 16)),  # large: JSON has 4,300 digits
    float: Kind("float", lambda value: (struct.pack(">d", value).hex(),), _of_bits),  # which JSON has not: nan, inf
    complex: Kind("complex", lambda value: (value.real, value.imag), lambda parts: complex(*parts)),
    type(Path()): Kind("path", lambda value: (str(value),), lambda parts: Path(*parts)),
    torch.dtype: Kind("dtype", lambda value: (str(value),), lambda parts: _DTYPES[parts[0]]),
    torch.device: Kind("device", lambda value: (str(value),), lambda parts: torch.device(*parts)),
    Tensor: Kind("tensor", _tensor_apart, _of_memory),  # it comes to the host, whatever device it is on
    **dict.fromkeys(_OF_NUMPY, Kind("number", lambda value: (value.item(),), lambda parts: parts[0])),  # as Python's
}


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _class_named(name: str) -> type:
    """Find a class that this process has imported. Raises ValueError where there is none of that name."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # a module's own __getattr__ may import
    if not isinstance(found, type):
        raise ValueError(f"{name} is no class that is imported here")
    return found


def _is_found(cls: type) -> bool:
    try:
        return _class_named(_name(cls)) is cls
    except ValueError:
        return False


def _holds_outputs(cls: type) -> bool:
    """Tell whether a model's outputs may be made of a class: the structure of an output is told by its classes."""
    return is_dataclass(cls) or issubclass(cls, tuple | list | Mapping)


def _class_apart(cls: type) -> Parts:
    if not _holds_outputs(cls) or not _is_found(cls):
        raise TypeError(f"the class {_name(cls)}, which is no container or not at the top level of a module")
    return (_name(cls),)


def _of_class_name(parts: Parts) -> type:
    cls = _class_named(*parts)
    if not _holds_outputs(cls):
        raise ValueError(f"{parts[0]} is no container")
    return cls


_CLASS = Kind("class", _class_apart, _of_class_name)
_NAMED = {kind.name: kind for kind in (*_KINDS.values(), _CLASS)}


@lru_cache(maxsize=4096)
def _kind_of_type(cls: type) -> Kind | None:
    """Return the kind of a type's values; None if they cannot be told.

    Of classes, enums can that others find by their names, and of hetu_fx's own frozen dataclasses, named tuples, and
    those that name what they consist of in `TOLD_FIELDS`.
    """
    if cls in _KINDS:
        return _KINDS[cls]
    if issubclass(cls, type):
        return _CLASS
    if not _is_found(cls):
        return None
    if issubclass(cls, Enum):
        return _enum_kind(cls)
    if not cls.__module__.startswith(OURS):
        return None
    if issubclass(cls, tuple):
        names = getattr(cls, "_fields", None)
        return None if names is None else _tuple_kind(cls, names)
    told: tuple[str, ...] | None = getattr(cls, "TOLD_FIELDS", None)
    if told is None and is_dataclass(cls) and cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        told = tuple(field.name for field in fields(cls) if field.init)  # its `__post_init__` makes the others
    return None if told is None else _object_kind(cls, told)


def _find_kind(name: str) -> Kind:
    """Return the kind that a message names. Raises ValueError where there is none."""
    kind = _NAMED.get(name) or _kind_of_type(_class_named(name))
    if kind is None or kind.name != name:
        raise ValueError(f"{name} is no kind of value that ranks tell each other")
    return kind


def _enum_kind(cls: type[Enum]) -> Kind:
    members = cls.__members__

    def apart(value: Enum) -> Parts:
        if value.name not in members:
            raise TypeError(f"{value!r}, which has no name of its own")
        return (value.name,)

    return Kind(_name(cls), apart, lambda parts: members[parts[0]])


def _tuple_kind(cls: type[tuple[Any, ...]], labels: tuple[str, ...]) -> Kind:
    def made(parts: Parts) -> Any:
        return tuple.__new__(cls, (value for _, value in zip(labels, parts, strict=True)))

    return Kind(_name(cls), lambda value: value, made, labels)


def _object_kind(cls: type, labels: tuple[str, ...]) -> Kind:
    check: Callable[[Any], None] | None = getattr(cls, "__post_init__", None)

    def apart(value: Any) -> Parts:
        return [getattr(value, label) for label in labels]

    def made(parts: Parts) -> Any:
        value: Any = object.__new__(cls)
        for label, part in zip(labels, parts, strict=True):
            object.__setattr__(value, label, part)
        if check is not None:
            check(value)
        return value

    return Kind(_name(cls), apart, made, labels, is_shared=True)


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
        value: of the kinds in the table, whatever it has inside.
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
    kind = _find_kind(name)
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
        return self._apart(value, _kind_of_type(cls))

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
