"""What every rank has one of: a process has one, or, where ranks are threads of one process, each of those its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
Belongings = dict[Callable[[], Any], Any]
"""What a rank has of everything that ranks have one of, by its class."""

_KEY = "hetu_fx belongings"


class _RanksHere:
    """The ranks of this process: one, which is the process, or threads.

    Attributes:
        of_process: what the process has.
        here: its `belongings` are those of the rank that this thread works for; a process has none.
        carried: how threads of autograd tell; None until ranks are threads.
    """

    def __init__(self) -> None:
        self.of_process: Belongings = {}
        self.here = threading.local()
        self.carried: Callable[[str], Belongings | None] | None = None


_ranks = _RanksHere()


def own(kind: Callable[[], T]) -> T:
    """Return the object of a class that the rank has for which this thread works; made when it is first asked for."""
    belongings = _belongings() if _ranks.carried else None  # asked at each message
    if belongings is None:
        belongings = _ranks.of_process
    found: T | None = belongings.get(kind)
    if found is None:
        found = belongings.setdefault(kind, kind())
    return found


def _belongings() -> Belongings | None:
    """Return what the rank has that this thread works for, or that has called a backward which this thread runs."""
    found: Belongings | None = getattr(_ranks.here, "belongings", None)
    carried = _ranks.carried
    return carried(_KEY) if found is None and carried else found


def is_one_of_many() -> bool:
    """Tell whether this thread works for one of several ranks of this process."""
    return _belongings() is not None


def no_threads_are_ranks() -> None:
    """Know that no thread works for a rank any longer, unless this one does: a process then asks nobody which it is."""
    if getattr(_ranks.here, "belongings", None) is None:
        _ranks.carried = None


@contextmanager
def as_rank(belongings: Belongings) -> Iterator[None]:
    """Work, in this thread, for the rank that has these."""
    from hetu_fx.base.torch_private import set_thread_local, thread_local_value  # which commands need not have

    _ranks.carried = thread_local_value
    before = getattr(_ranks.here, "belongings", None)
    _ranks.here.belongings = belongings
    try:
        with set_thread_local(_KEY, belongings):
            yield
    finally:
        _ranks.here.belongings = before
