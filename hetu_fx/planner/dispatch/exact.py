"""Rows for sequences so that the slowest row is fastest, exactly: depth first, with bounds.

Sequences are placed longest first. What rows of equal tokens and equal squared tokens get next is the same, so
such rows, empty ones above all, are tried once, and no state of all rows is searched twice: with that the
symmetry of equal rows and of equal sequences is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hetu_fx.planner.dispatch.local_search import EPSILON
from hetu_fx.planner.dispatch.strategy import Scheme

_State = tuple[int, int]  # tokens and squared tokens of a row: whole numbers, so that equal is equal


@dataclass(slots=True)
class ExactRows:
    """The search of one pipeline's rows that all take less than `below` seconds; `lengths` fall.

    `row_of` is the best found so far, None before any, and `below` its slowest row.
    """

    scheme: Scheme
    lengths: Sequence[int]
    num_rows: int
    below: float
    row_of: list[int] | None = None
    _seconds: list[float] = field(init=False)
    _tokens_left: list[int] = field(init=False)
    _seconds_left: list[float] = field(init=False)
    _chosen: list[int] = field(init=False)
    _rows: list[_State] = field(init=False)
    _seen: set[tuple[int, tuple[_State, ...]]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._seconds = [self.scheme.times.seconds(length) for length in self.lengths]
        self._tokens_left = list(accumulate(reversed(self.lengths), initial=0))[::-1]
        self._seconds_left = list(accumulate(reversed(self._seconds), initial=0.0))[::-1]
        self._chosen = [0] * len(self.lengths)
        self._rows = [(0, 0)] * self.num_rows

    def search(self) -> list[int] | None:
        """Return the row of each sequence in the best rows, None when none takes less than `below`."""
        self._place(0)
        return self.row_of

    def _place(self, item: int) -> None:
        if not self._is_new_and_possible(item):
            return
        if item == len(self.lengths):
            self.below, self.row_of = max(map(self._row_seconds, self._rows)), list(self._chosen)
            return
        for row in self._choices():
            before = self._rows[row]
            after = before[0] + self.lengths[item], before[1] + self.lengths[item] ** 2
            if after[0] <= self.scheme.max_length and self._row_seconds(after) < self._limit:
                self._rows[row], self._chosen[item] = after, row
                self._place(item + 1)
                self._rows[row] = before

    def _is_new_and_possible(self, item: int) -> bool:
        state = (item, tuple(sorted(self._rows)))
        if state in self._seen:
            return False
        self._seen.add(state)
        seconds = sum(max(0.0, self._limit - self._row_seconds(row)) for row in self._rows)
        tokens = sum(self.scheme.max_length - row[0] for row in self._rows)
        return seconds >= self._seconds_left[item] * (1 - EPSILON) and tokens >= self._tokens_left[item]

    def _choices(self) -> list[int]:
        """Return the rows to try, least busy first, one of those that are alike."""
        different = {state: row for row, state in reversed(list(enumerate(self._rows)))}
        return [different[state] for state in sorted(different, key=self._row_seconds)]

    @property
    def _limit(self) -> float:
        return self.below * (1 - EPSILON)

    def _row_seconds(self, row: _State) -> float:
        return self.scheme.times.a * row[1] + self.scheme.times.b * row[0]
