"""How many rows each run of devices can do by a deadline, over all replicas that it can form.

With stage seconds l_s(x) = a_s + b_s x, m micro-batches of x rows are done by T when for every stage s

    sum_r l_r(x) + (m - 1) l_s(x) <= T                                                          (1)

Each s bounds x from above, as memory does, so the most rows by T is m times the least bound: no search is
needed. When not even x = 1 is done, fewer micro-batches of one row are:

    k <= 1 + (T - sum_r l_r(1)) / max_s l_s(1)                                                  (2)

All replicas of a search are worked out at once, element by element, so that every machine gets the same
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetu_fx.planner.search.replica import Replica

Segment = tuple[int, int]
"""Positions [start, stop) in an order of devices."""

Numbers = NDArray[np.float64]

_EPSILON = 1e-9  # a bound that is a whole number up to rounding counts as that number


@dataclass(frozen=True, slots=True)
class Option:
    """A replica run in so many micro-batches of at most so many rows; what follows it takes `end_seconds`."""

    segment: Segment
    replica: Replica
    micro_batches: int
    most_micro_rows: int
    end_seconds: float


class DeadlineTable:
    """The options of all segments, and the rows that each does by a deadline."""

    def __init__(self, options: Sequence[Option], total: int) -> None:
        """No option does more than `total` rows. Options of a segment must stand together."""
        self.options, self._total = tuple(options), total
        width = max((len(option.replica.lines) for option in options), default=1)
        a, b = (self._padded(width, name) for name in ("fixed", "slope"))
        self._count = np.array([float(option.micro_batches) for option in options])
        self._most = np.array([float(min(option.most_micro_rows, total)) for option in options])
        self._end = np.array([option.end_seconds for option in options])
        self._sum_a = np.array([sum(line.fixed for line in o.replica.lines) for o in options])
        self._sum_b = np.array([sum(line.slope for line in o.replica.lines) for o in options])
        extra = self._count[:, None] - 1
        self._constant = self._sum_a[:, None] + extra * a
        self._slope = self._sum_b[:, None] + extra * b
        self._longest = (a + b).max(axis=1, initial=0.0)

    def _padded(self, width: int, name: str) -> Numbers:
        rows = [[getattr(line, name) for line in option.replica.lines] for option in self.options]
        return np.array([row + [0.0] * (width - len(row)) for row in rows]).reshape(len(rows), width)

    def most_rows(self, deadline: float) -> Numbers:
        """Return the most rows that each option does by the deadline, by (1), (2) and memory."""
        left = deadline - self._end
        bounds = _ratio(left[:, None] - self._constant, self._slope, self._total)
        bound = bounds.min(axis=1, initial=float(self._total))
        micro_rows = np.minimum(np.floor(bound + _EPSILON), self._most)
        single = 1 + np.floor(_ratio(left - self._sum_a - self._sum_b, self._longest, self._total) + _EPSILON)
        few = np.where(self._most >= 1, np.minimum(np.maximum(single, 0), self._count), 0)
        rows: Numbers = np.minimum(np.where(micro_rows >= 1, self._count * micro_rows, few), self._total)
        return rows

    def best(self, deadline: float) -> Mapping[Segment, tuple[int, int]]:
        """Return (rows, index of the option) of the best option of each segment that does any row."""
        result: dict[Segment, tuple[int, int]] = {}
        for index, rows in enumerate(self.most_rows(deadline).tolist()):
            segment = self.options[index].segment
            if rows > result.get(segment, (0, 0))[0]:
                result[segment] = (int(rows), index)
        return result


def _ratio(left: Numbers, slope: Numbers, most: int) -> Numbers:
    """Return left / slope; where nothing is needed (slope 0), `most` if time is left, else -1."""
    free = np.where(left >= 0, float(most), -1.0)
    return np.divide(left, slope, out=free, where=slope > 0)
