"""Keep the cheapest of several ways to have got to the same point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

WIDTH = 16
"""How many ways are kept in mind at once."""

_DIGITS = 9  # sums that differ by less are the same, added in another order


class Way(Protocol):
    """A way so far: what it costs, and how often it left what would be done if all cost the same."""

    seconds: float
    departures: int

    @property
    def future(self) -> object:
        """All that its continuation depends on."""
        ...


W = TypeVar("W", bound=Way)


def cheapest(ways: Sequence[W]) -> Sequence[W]:
    """Return the cheapest way to each future, no more than `WIDTH` in all, in order of price, then of departures."""
    if len(ways) == 1:
        return ways
    least = min(way.seconds for way in ways) or 1.0
    best: dict[object, W] = {}
    for way in sorted(ways, key=lambda way: (round(way.seconds / least, _DIGITS), way.departures)):
        best.setdefault(way.future, way)
    return tuple(best.values())[:WIDTH]
