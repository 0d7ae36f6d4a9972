"""How values of one kind stand in a JSON file: what they must be, what they mean."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetu_fx.base.checks import size_parts
from hetu_fx.base.documents import json_kind
from hetu_fx.errors import HetuFxError

_EXACT = 1 << 53


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Values:
    """One kind of values.

    Attributes:
        what: what to give, as errors say it.
        fits: tells whether a JSON value is of this kind; `read` takes only such.
        read: returns what a JSON value means; where it stands is told in errors.
        write: returns the JSON value.
    """

    what: str
    fits: Callable[[Any], bool]
    read: Callable[[Any, str], Any] = lambda value, _: value
    write: Callable[[Any], Any] = _same


def is_object(value: Any) -> bool:
    """Tell whether a JSON value is an object."""
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_integer(value: Any) -> bool:
    """Tell whether a value is a whole number; 24e9 is one, as far as floats are exact."""
    if isinstance(value, float):
        return value.is_integer() and abs(value) <= _EXACT
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (_is_integer(value) and abs(value) <= sys.float_info.max)


def _is_size(value: Any) -> bool:
    parts = size_parts(value, 1024) if isinstance(value, str) else None
    return _is_integer(value) if parts is None else re.fullmatch(r"\d{1,15}(\.\d{0,15})?", parts[0]) is not None


def _size(value: Any, where: str) -> int:
    number, unit = size_parts(value, 1024) if isinstance(value, str) else (value, 1)  # type: ignore[misc]
    return int(float(number) * unit)


INTEGER = Values("a whole number", _is_integer, lambda value, _: int(value))
SIZE = Values('a whole number of bytes, or text such as "24G"', _is_size, _size)
NUMBER = Values("a number", _is_number, lambda value, _: float(value))
TEXT = Values("a string", lambda value: isinstance(value, str))
FLAG = Values("true or false", lambda value: isinstance(value, bool))
PAIRS = Values("an object", is_object, lambda value, _: tuple(value.items()), dict)


def _list_of(what: str, one: Values) -> Values:
    """Return a list of plain values, as a tuple; `what` says several of them."""

    def fit(values: Any) -> bool:
        return _is_list(values) and all(map(one.fits, values))

    def read(values: Any, where: str) -> Any:
        return tuple(one.read(value, where) for value in values)

    return Values(f"a list of {what}", fit, read, list)


INTEGERS = _list_of("whole numbers", INTEGER)
NUMBERS = _list_of("numbers", NUMBER)
TEXTS = _list_of("strings", TEXT)


def many(one: Values) -> Values:
    """Return a list of objects of one kind, which look at what they are read from, as a tuple."""

    def read(values: Any, where: str) -> Any:
        return tuple(one.read(value, f"{where}[{i}]") for i, value in enumerate(values))

    return Values("a list", _is_list, read, lambda values: [one.write(value) for value in values])


def numbers(error: type[HetuFxError], number: Callable[[Any], float] = float) -> Values:
    """Return an object of numbers by name, as pairs."""

    def read(values: Any, where: str) -> Any:
        for name, value in values.items():
            if not _is_number(value):
                raise error(f"{where}: {name!r} must be a number, not {json_kind(value)}")
        return tuple((name, number(value)) for name, value in values.items())

    return Values("an object", is_object, read, dict)


def object_by_number(counted: str, error: type[HetuFxError]) -> Values:
    """Return an object of numbers by whole numbers, which JSON writes as strings; `counted` is what they count."""

    def read(values: Any, where: str) -> Any:
        wrong = [name for name in values if not name.isdecimal()]
        if wrong:
            holder, key = re.split(r"(?:: |\.)(?=\w+$)", where)
            raise error(f'{holder}: {key!r} has keys {wrong}\nhint: give whole numbers of {counted}, such as "8"')
        return {int(name): number for name, number in numbers(error).read(values, where)}

    return Values("an object", is_object, read, lambda values: {str(key): values[key] for key in sorted(values)})


def named_texts(error: type[HetuFxError]) -> Values:
    """Return an object of strings by name."""

    def read(values: Any, where: str) -> Any:
        for name, text in values.items():
            if not TEXT.fits(text):
                raise error(f"{where}: {name!r} must be {TEXT.what}, not {json_kind(text)}")
        return dict(values)

    return Values("an object", is_object, read, dict)
