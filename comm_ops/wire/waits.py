"""What this process waits for, in all threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """A communication under way: what it is, since when (time.perf_counter), and among whom, if they are watched."""

    what: str
    start: float
    among: object | None = None


_waits: list[Wait] = []


@contextmanager
def waiting(what: str, among: object | None = None) -> Iterator[Wait]:
    """Say that this process waits inside."""
    wait = Wait(what, perf_counter(), among)
    _waits.append(wait)
    try:
        yield wait
    finally:
        _waits.remove(wait)


def oldest_wait(among: object | None = None) -> Wait | None:
    """Return what this process has waited for longest, `among` (None: any); None if it does not communicate."""
    waits = [wait for wait in tuple(_waits) if among is None or wait.among is among]
    return min(waits, key=lambda wait: wait.start, default=None)
