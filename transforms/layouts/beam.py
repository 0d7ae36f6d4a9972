"""A beam: keep the cheapest of several walks that have come to the same point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

WIDTH = 16
"""How many walks are kept in mind at once."""

_DIGITS = 9  # sums that differ by less are the same, added in another order

Step = TypeVar("Step")


class Branch(ABC, Generic[Step]):
    """A walk so far: what it costs, how often it left what would be done if all cost the same, and its steps.

    Branches that have gone the same way share those steps.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.departures = 0
        self._trail: tuple[Any, Step] | None = None

    @property
    @abstractmethod
    def future(self) -> object:
        """All that its continuation depends on."""

    def add(self, step: Step) -> None:
        """Take one more step."""
        self._trail = (self._trail, step)

    def steps(self) -> Iterator[Step]:
        """Yield the steps, the last first."""
        trail = self._trail
        while trail is not None:
            trail, step = trail
            yield step


B = TypeVar("B", bound=Branch[Any])


def beam(walks: Sequence[B]) -> Sequence[B]:
    """Return the cheapest walk to each future, no more than `WIDTH` in all, in order of price, then of departures."""
    if len(walks) == 1:
        return walks
    least = min(walk.seconds for walk in walks) or 1.0
    best: dict[object, B] = {}
    for walk in sorted(walks, key=lambda walk: (round(walk.seconds / least, _DIGITS), walk.departures)):
        best.setdefault(walk.future, walk)
    return tuple(best.values())[:WIDTH]
