"""In how many slices a product is made beside the communication before or after it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from hetu_fx.errors import CommError

COUNTS = (1, 2, 4, 8)
"""More slices hide little that is not hidden, and each costs messages and a smaller product."""

GAIN = 1.05
"""Slices must make a product and its communication so many times as fast, as prices are no better than that."""

_MOST_ROWS = 1 << 24
_BOUND = re.compile(r"(\d+) from (\d+)")


@dataclass(frozen=True, slots=True)
class Slices:
    """In how many slices rows are cut, by how many there are: (slices, from so many rows on), both rising."""

    bounds: tuple[tuple[int, int], ...] = ()

    def count(self, rows: int) -> int:
        """Return in how many slices so many rows are cut."""
        return next((count for count, least in reversed(self.bounds) if rows >= max(least, count)), 1)

    def __str__(self) -> str:
        """Write it as `2 from 512; 4 from 4096`, which `parse_slices` reads; one slice is empty."""
        return "; ".join(f"{count} from {least}" for count, least in self.bounds)


@lru_cache(maxsize=1024)
def parse_slices(text: str) -> Slices:
    """Read what `str(slices)` wrote; raise CommError on anything else."""
    found = [_BOUND.fullmatch(part) for part in text.split("; ")] if text else []
    made = Slices(tuple((int(bound[1]), int(bound[2])) for bound in found if bound))
    if str(made) != text:
        raise CommError(f"cannot read the slices {text!r}\nhint: write them like '2 from 512; 4 from 4096'")
    return made


@dataclass(frozen=True, slots=True)
class OverlapCost:
    """A product of some rows, and communication that can travel beside it.

    Attributes:
        product_seconds: of all rows.
        sent_seconds: gives those of the communication, from the share of all rows that is sent.
        slice_seconds: what a slice takes besides its work: an op, the start and the end of a message.
        host_seconds: of the processor that computes, which the communication of all rows takes.
    """

    product_seconds: float
    sent_seconds: Callable[[float], float]
    slice_seconds: float
    host_seconds: float = 0.0

    def seconds(self, slices: int) -> float:
        """Return what both take in so many slices: the longer one, and of the other the first or last slice."""
        sent = self.sent_seconds(1 / slices)
        if slices == 1:
            return self.product_seconds + sent
        made = self.slice_seconds + (self.product_seconds + self.host_seconds) / slices
        return made + (slices - 1) * max(made, sent) + sent

    @property
    def slices(self) -> int:
        """Return in how many slices both take least; 1 where more gain little."""
        best = min(COUNTS, key=self.seconds)
        return best if self.seconds(best) * GAIN <= self.seconds(1) else 1


def best_slices(of_rows: Callable[[int], OverlapCost]) -> Slices:
    """Return the slices that take least, from what numbers of rows take; bounds are powers of two.

    Measurements that differ a little so give the same graph on all ranks.
    """
    return Slices(tuple(_bounds((rows, of_rows(rows).slices) for rows in _powers_of_two())))


def _powers_of_two() -> Iterable[int]:
    return (1 << power for power in range(_MOST_ROWS.bit_length()))


def _bounds(counts: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    most = 1
    for rows, count in counts:
        if count > most:
            yield count, rows
            most = count
