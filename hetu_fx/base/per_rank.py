"""What every rank has one of: a process has one, or, where ranks are threads of one process, each of those its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Belongings = dict[Any, Any]
"""What a rank has of everything that ranks have one of."""

_here = threading.local()  # its `belongings` are those of the rank that this thread works for; a process has none
_KEY = "hetu_fx belongings"
_carried: list[Callable[[str], Belongings | None]] = []  # how threads of autograd tell; empty until ranks are threads


class PerRank(Generic[T]):
    """Gives every rank its own; `make` makes one."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._of_process = make, make()

    def __call__(self) -> T:
        """Return that of the rank that this thread works for."""
        belongings = _belongings() if _carried else None  # asked at each message
        if belongings is None:
            return self._of_process
        if self not in belongings:
            belongings[self] = self._make()
        found: T = belongings[self]
        return found


def _belongings() -> Belongings | None:
    """Return what the rank has that this thread works for, or that has called a backward which this thread runs."""
    found: Belongings | None = getattr(_here, "belongings", None)
    return _carried[0](_KEY) if found is None and _carried else found


def is_one_of_many() -> bool:
    """Tell whether this thread works for one of several ranks of this process."""
    return _belongings() is not None


def no_threads_are_ranks() -> None:
    """Know that no thread works for a rank any longer, unless this one does: a process then asks nobody which it is."""
    if getattr(_here, "belongings", None) is None:
        _carried.clear()


@contextmanager
def as_rank(belongings: Belongings) -> Iterator[None]:
    """Work, in this thread, for the rank that has these."""
    from hetu_fx.base.torch_private import set_thread_local, thread_local_value  # which commands need not have

    _carried[:] = [thread_local_value]
    before = getattr(_here, "belongings", None)
    _here.belongings = belongings
    try:
        with set_thread_local(_KEY, belongings):
            yield
    finally:
        _here.belongings = before
