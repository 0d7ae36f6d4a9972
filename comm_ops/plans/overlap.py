"""In how many slices a product is made beside the communication before or after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST_SLICES = 8
"""More hide little that is not hidden, and each costs messages and a smaller product."""

GAIN = 1.05
"""Slices must make a product and its communication so many times as fast, as prices are no better than that."""


def num_slices(rows: int, slices: int, least: int) -> int:
    """Return in how many slices rows are cut: up to `slices`, of `least` rows or more."""
    return max(1, min(slices, rows // max(1, least)))


@dataclass(frozen=True, slots=True)
class Beside:
    """A product, and communication that can travel beside it.

    Attributes:
        product_seconds: of all rows.
        sent_seconds: gives those of the communication, from the share of all rows that is sent.
        op_seconds: what running the product of a slice takes besides its work.
        host_seconds: of the processor that computes, which are taken by the communication of all rows.
    """

    product_seconds: float
    sent_seconds: Callable[[float], float]
    op_seconds: float
    host_seconds: float = 0.0

    def seconds(self, slices: int) -> float:
        """Return what both take in so many slices: the longer one, and of the other the first or last slice."""
        sent = self.sent_seconds(1 / slices)
        if slices == 1:
            return self.op_seconds + self.product_seconds + sent
        made = self.op_seconds + (self.product_seconds + self.host_seconds) / slices
        return made + (slices - 1) * max(made, sent) + sent

    @property
    def slices(self) -> int:
        """Return in how many slices both take least; 1 where more gain little."""
        best = min(range(1, MOST_SLICES + 1), key=self.seconds)
        return best if self.seconds(best) * GAIN <= self.seconds(1) else 1
