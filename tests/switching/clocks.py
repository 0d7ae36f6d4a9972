"""Clocks of devices that tests make up."""

from __future__ import annotations


class Ahead:
    """The clock of a device whose host is ahead: it has come to none of its moments until it is told or waited for."""

    def __init__(self) -> None:
        self.moments, self.waits, self.has_come = 0, 0, False

    def now(self) -> int:
        self.moments += 1
        return self.moments

    def seconds(self, start: int, end: int) -> float:
        self.waits += 1
        return float(end - start)

    def is_past(self, moment: int) -> bool:
        return self.has_come
