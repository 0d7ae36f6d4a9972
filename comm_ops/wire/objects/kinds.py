"""Which values ranks tell each other, and what each of them consists of: a table of types, and a rule for classes.

Reading makes values of these kinds and no others. It imports nothing, and calls what is in this file and the checks
(`__post_init__`) of hetu_fx's own frozen classes.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetu_fx.comm_ops.wire.flat import dense

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
def kind_of_type(cls: type) -> Kind | None:
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


def find_kind(name: str) -> Kind:
    """Return the kind that a message names. Raises ValueError where there is none."""
    kind = _NAMED.get(name) or kind_of_type(_class_named(name))
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
