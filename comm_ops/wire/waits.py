"""What this process waits for, in all threads."""

from __future__ import annotations


class Wait:
    """A communication under way: what it is, since when (time.perf_counter), and among whom, if they are watched.

    This process says that it waits from when it is made to its `end`.
    """

    __slots__ = ("among", "start", "what")

    def __init__(self, what: str, start: float, among: object | None = None) -> None:
        self.what, self.start, self.among = what, start, among
        _waits.append(self)

    def end(self) -> None:
        """Say that it is over."""
        _waits.remove(self)


_waits: list[Wait] = []


def oldest_wait(among: object | None = None) -> Wait | None:
    """Return what this process has waited for longest, `among` (None: any); None if it does not communicate."""
    waits = [wait for wait in tuple(_waits) if among is None or wait.among is among]
    return min(waits, key=lambda wait: wait.start, default=None)
