"""What a run keeps in Python's memory: the last of what happens again and again; and when garbage is looked for."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_KEPT = 4096
"""Items of a log that are kept: the last."""


class Log(Generic[T]):
    """The last of what was noted, and how much was noted in all.

    Attributes:
        count: of what was noted, also of what is no longer kept.
    """

    def __init__(self) -> None:
        self.count = 0
        self._kept: deque[T] = deque(maxlen=MOST_KEPT)

    def __iter__(self) -> Iterator[T]:
        return iter(self._kept)

    def note(self, item: T) -> None:
        """Note one more."""
        self._kept.append(item)
        self.count += 1  # last: who reads meanwhile, in another thread, gets it the next time

    def since(self, count: int) -> list[T]:
        """Return what was noted after the first `count`, so far as it is kept."""
        new = min(self.count - count, len(self._kept))
        return list(self._kept)[-new:] if new else []


@contextmanager
def without_collections() -> Iterator[None]:
    """Look for no garbage inside, in any thread; afterwards as before."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
