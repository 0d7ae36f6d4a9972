"""A beam: keep the cheapest of several walks that have come to the same point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

WIDTH = 16
"""How many walks are kept in mind at once."""

_DIGITS = 9  # sums that differ by less are the same, added in another order


class Candidate(Protocol):
    """A walk so far: what it costs, and how often it left what would be done if all cost the same."""

    seconds: float
    departures: int

    @property
    def future(self) -> object:
        """All that its continuation depends on."""
        ...


C = TypeVar("C", bound=Candidate)


def beam(walks: Sequence[C]) -> Sequence[C]:
    """Return the cheapest walk to each future, no more than `WIDTH` in all, in order of price, then of departures."""
    if len(walks) == 1:
        return walks
    least = min(walk.seconds for walk in walks) or 1.0
    best: dict[object, C] = {}
    for walk in sorted(walks, key=lambda walk: (round(walk.seconds / least, _DIGITS), walk.departures)):
        best.setdefault(walk.future, walk)
    return tuple(best.values())[:WIDTH]
