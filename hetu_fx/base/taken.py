"""The first of many, worked out as far as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Taken(Generic[T]):
    """What has been taken from an iterator, which goes on where it is asked for more."""

    def __init__(self, found: Iterator[T]) -> None:
        self._rest, self._taken = found, list[T]()

    def first(self, count: int) -> list[T]:
        """Return the first ones, so many or all that there are."""
        self._taken.extend(islice(self._rest, max(0, count - len(self._taken))))
        return self._taken[:count]
