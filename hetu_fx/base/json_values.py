"""How values of one kind stand in a JSON file: what they must be, what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hetu_fx.base.documents import kind_of
from hetu_fx.errors import HetuFxError


class Values(Protocol):
    """How values of one kind stand in a file."""

    @property
    def what(self) -> str:
        """Return what to give, as errors say it."""
        ...

    def fits(self, value: Any) -> bool:
        """Tell whether a JSON value is of this kind; `read` takes only such."""
        ...

    def read(self, value: Any, where: str) -> Any:
        """Return what a JSON value means; `where` it stands is told in errors."""
        ...

    def write(self, value: Any) -> Any:
        """Return the JSON value."""
        ...


@dataclass(frozen=True)
class Plain:
    """Values that a file has as they are, or nearly so."""

    what: str
    fits: Callable[[Any], bool]
    take: Callable[[Any], Any] | None = None
    give: Callable[[Any], Any] | None = None

    def read(self, value: Any, where: str) -> Any:
        """Return the value."""
        return value if self.take is None else self.take(value)

    def write(self, value: Any) -> Any:
        """Return the JSON value."""
        return value if self.give is None else self.give(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_integers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_integer, value))


INTEGER = Plain("a whole number", _is_integer)
NUMBER = Plain("a number", _is_number, float)
TEXT = Plain("a string", lambda value: isinstance(value, str))
FLAG = Plain("true or false", lambda value: isinstance(value, bool))
INTEGERS = Plain("a list of whole numbers", _are_integers, tuple, list)
PAIRS = Plain("an object", lambda value: isinstance(value, dict), lambda value: tuple(value.items()), dict)


@dataclass(frozen=True)
class Many:
    """A list of values of one kind, as a tuple."""

    of: Values

    what = "a list"

    def fits(self, value: Any) -> bool:
        """Tell whether a JSON value is a list."""
        return isinstance(value, list)

    def read(self, value: Any, where: str) -> Any:
        """Return the values."""
        return tuple(self.of.read(one, f"{where}[{i}]") for i, one in enumerate(value))

    def write(self, value: Any) -> Any:
        """Return the JSON list."""
        return [self.of.write(one) for one in value]


@dataclass(frozen=True)
class Numbers:
    """An object of numbers by name, as pairs."""

    error: type[HetuFxError]
    number: Callable[[Any], float] = float

    what = "an object"

    def fits(self, value: Any) -> bool:
        """Tell whether a JSON value is an object."""
        return isinstance(value, dict)

    def read(self, value: Any, where: str) -> Any:
        """Return the numbers."""
        for name, number in value.items():
            if not NUMBER.fits(number):
                raise self.error(f"{where}: {name!r} must be a number, not {kind_of(number)}")
        return tuple((name, self.number(number)) for name, number in value.items())

    def write(self, value: Any) -> Any:
        """Return the JSON object."""
        return dict(value)


@dataclass(frozen=True)
class Numbered:
    """An object of numbers by whole numbers, which JSON writes as strings; `counted` is what they count."""

    counted: str
    error: type[HetuFxError]

    what = "an object"

    def fits(self, value: Any) -> bool:
        """Tell whether a JSON value is an object."""
        return isinstance(value, dict)

    def read(self, value: Any, where: str) -> Any:
        """Return the numbers by whole numbers."""
        wrong = [name for name in value if not name.isdecimal()]
        if wrong:
            holder, key = re.split(r"(?:: |\.)(?=\w+$)", where)
            raise self.error(f'{holder}: {key!r} has keys {wrong}; give whole numbers of {self.counted}, such as "8"')
        return {int(name): number for name, number in Numbers(self.error).read(value, where)}

    def write(self, value: Any) -> Any:
        """Return the JSON object, in order."""
        return {str(key): number for key, number in sorted(value.items())}
