"""Which sequences share a micro-batch of a pipeline: the second stage of Hydraulis' data assignment.

Rows of at most `max_length` tokens are filled so that (3) of the cost model is least over the number v of rows
and what is in them. As in Hydraulis' planner every v in

    ceil(tokens / max_length) <= v <= min(sequences, tokens / filling tokens)           (1)

may win, and the rows end in order of their tokens, most first. Left is that planner where it solves each v by a
general integer programme within half a second, which equal sequences make slow: here v is tried in the order of
a bound on (3), until the bound is no better than what was found. Few sequences are packed exactly, with the
symmetry broken, many by the same search as a dispatch.

Exactly is depth first, with bounds: sequences are placed longest first. What rows of equal tokens and equal squared
tokens get next is the same, so such rows, empty ones above all, are tried once, and no state of all rows is searched
twice: with that the symmetry of equal rows and of equal sequences is gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.makespan import EPSILON, Assigning, Effort, assign
from hetu_fx.planner.dispatch.row_dispatch import NO_ROWS, RowAssignment, group_by_row, quick_rows, sweep_counts
from hetu_fx.planner.dispatch.scheme_costs import Scheme, check_each_once

EXACT_SEQUENCES = 10
"""Up to so many sequences of a pipeline are packed exactly."""

_SLACK = 1e-3  # where there are more, a number of rows that cannot be better by this share is not tried
_RESTARTS = 20
_RENEWED_ITEMS = 200


@dataclass(frozen=True, slots=True)
class Packing:
    """The rows of a pipeline, each the positions of its sequences in `lengths`, every sequence exactly once.

    No packing of these sequences gets below `bound_seconds`. A pipeline without sequences has no rows.
    """

    scheme: Scheme
    lengths: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    bound_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_each_once("a packing", self.rows, len(self.lengths))
        if not all(self.rows):
            raise PlanError(f"a packing has an empty row in {self.rows}\nhint: leave it out")
        full = [tokens for tokens in self.row_tokens if tokens > self.scheme.max_length]
        if full:
            most = self.scheme.max_length
            raise PlanError(f"a packing has rows of {full} tokens, but {self.scheme} holds {most}\nhint: use more rows")

    @property
    def row_tokens(self) -> tuple[int, ...]:
        """Return the tokens of each row."""
        return tuple(sum(self.lengths[position] for position in row) for row in self.rows)

    @property
    def row_seconds(self) -> tuple[float, ...]:
        """Return the seconds per stage of each row, without what each micro-batch costs besides."""
        times = self.scheme.times
        return tuple(math.fsum(times.seconds(self.lengths[position]) for position in row) for row in self.rows)

    @property
    def seconds(self) -> float:
        """Return (3) of the cost model."""
        return self.scheme.seconds(max(self.row_seconds), len(self.rows)) if self.rows else 0.0


def pack(scheme: Scheme, lengths: Sequence[int], *, seed: int = 0) -> Packing:
    """Return the best packing of up to `EXACT_SEQUENCES` sequences, a good one of more, with a bound on the best.

    The same for a seed, whatever the order of the lengths. Raises `PlanError` for a sequence longer than a row.
    """
    sweep = _Sweep(scheme, _falling(scheme, lengths), seed)
    return _packing(scheme, lengths, sweep.best, sweep.bound)


def pack_quickly(scheme: Scheme, lengths: Sequence[int]) -> Packing:
    """Return the packing by longest-first."""
    return _packing(scheme, lengths, quick_rows(scheme, _falling(scheme, lengths)), 0.0)


def packings(groups: Sequence[tuple[Scheme, Sequence[int]]], *, seed: int = 0) -> tuple[Packing, ...]:
    """Return the packings of pipelines that have sequences of these lengths, those that could be last with care."""
    packed = [pack_quickly(scheme, lengths) for scheme, lengths in groups]
    careful: set[int] = set()
    while (last := max(range(len(packed)), key=lambda i: packed[i].seconds)) not in careful:
        packed[last] = pack(packed[last].scheme, packed[last].lengths, seed=seed)
        careful.add(last)
    return tuple(packed)


def _falling(scheme: Scheme, lengths: Sequence[int]) -> list[int]:
    if max(lengths, default=0) > scheme.max_length:
        raise PlanError(
            f"{scheme} holds rows of {scheme.max_length} tokens, not of {max(lengths)}\nhint: cut the sequence"
        )
    return sorted(lengths, reverse=True)


def _packing(scheme: Scheme, lengths: Sequence[int], found: RowAssignment, bound: float) -> Packing:
    """Return the packing of rows of falling lengths, the rows of most tokens first."""
    order = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    rows = filter(None, group_by_row(order, found.row_of))
    by_tokens = sorted(rows, key=lambda row: (-sum(lengths[i] for i in row), [-lengths[i] for i in row], row))
    made = Packing(scheme, tuple(lengths), tuple(by_tokens))
    return replace(made, bound_seconds=min(bound, made.seconds))  # sums in another order may round otherwise


def _row_bound(seconds: Sequence[float], rows: int) -> float:
    """Return seconds that the slowest of so many rows cannot stay below; `seconds` fall.

    Rows share the work; and of the first k rows + 1 sequences some row gets k + 1, the least of them at least.
    """
    bound = sum(seconds) / rows
    for count in range(1, (len(seconds) - 1) // rows + 2):
        last = (count - 1) * rows + 1
        bound = max(bound, sum(seconds[last - count : last]))
    return bound


class _Sweep:
    """The best rows of all numbers of rows, and what none gets below."""

    def __init__(self, scheme: Scheme, lengths: list[int], seed: int) -> None:
        """`lengths` fall."""
        self._scheme, self._lengths, self._seed = scheme, lengths, seed
        self._is_small = len(lengths) <= EXACT_SEQUENCES
        self._slack = EPSILON if self._is_small else _SLACK
        self._seconds = [scheme.times.seconds(length) for length in lengths]
        self.best = NO_ROWS if self._is_small and lengths else quick_rows(scheme, lengths)
        self.bound = math.inf
        sweep_counts(scheme, lengths, self._seconds, self._try)
        self.bound = min(self.bound, self.best.seconds if self._is_small else self._worth)

    def _try(self, count: int) -> float:
        """Look for better rows; return what others must beat."""
        least = _row_bound(self._seconds, count)
        bound = self._scheme.seconds(least, count)
        if bound < self._worth:
            self._take(count, self._exact(count) if self._is_small else self._assigned(count, least))
            self.bound = self.bound if self._is_small else min(self.bound, bound)
        return self._worth

    @property
    def _worth(self) -> float:
        return self.best.seconds * (1 - self._slack)

    def _assigned(self, count: int, least: float) -> list[int] | None:
        shape = (count, len(self._lengths))
        problem = Assigning(
            seconds=np.broadcast_to(np.array(self._seconds), shape),
            may=np.ones(shape, dtype=np.bool_),
            fill=np.zeros(count),
            room=np.full(count, float(self._scheme.max_length)),
            tokens=np.array(self._lengths, dtype=np.float64),
        )
        found = assign(problem, Effort(_RESTARTS, self._seed, lambda _: least, _RENEWED_ITEMS))
        return None if found is None else [int(row) for row in found]

    def _exact(self, count: int) -> list[int] | None:
        below = self.best.seconds / (self._scheme.fill + count) - self._scheme.times.c
        return _ExactRows(self._scheme, self._lengths, count, below).search()

    def _take(self, count: int, row_of: list[int] | None) -> None:
        if row_of is None:
            return
        slowest = float(np.bincount(row_of, self._seconds, count).max())
        seconds = self._scheme.seconds(slowest, count)
        if seconds < self.best.seconds:
            self.best = RowAssignment(seconds, tuple(row_of))


_State = tuple[int, int]  # tokens and squared tokens of a row: whole numbers, so that equal is equal


class _ExactRows:
    """The search of one pipeline's rows that all take less than `below` seconds; `lengths` fall.

    `_row_of` is the best found so far, None before any, and `_below` its slowest row.
    """

    def __init__(self, scheme: Scheme, lengths: Sequence[int], num_rows: int, below: float) -> None:
        self._scheme, self._lengths, self._below = scheme, lengths, below
        seconds = [scheme.times.seconds(length) for length in lengths]
        self._tokens_left = list(accumulate(reversed(lengths), initial=0))[::-1]
        self._seconds_left = list(accumulate(reversed(seconds), initial=0.0))[::-1]
        self._chosen, self._rows = [0] * len(lengths), [(0, 0)] * num_rows
        self._row_of: list[int] | None = None
        self._seen: set[tuple[int, tuple[_State, ...]]] = set()

    def search(self) -> list[int] | None:
        """Return the row of each sequence in the best rows, None when none takes less than `below`."""
        self._place(0)
        return self._row_of

    def _place(self, item: int) -> None:
        if not self._is_new_and_possible(item):
            return
        if item == len(self._lengths):
            self._below, self._row_of = max(map(self._row_seconds, self._rows)), list(self._chosen)
            return
        for row in self._choices():
            before = self._rows[row]
            after = before[0] + self._lengths[item], before[1] + self._lengths[item] ** 2
            if after[0] <= self._scheme.max_length and self._row_seconds(after) < self._limit:
                self._rows[row], self._chosen[item] = after, row
                self._place(item + 1)
                self._rows[row] = before

    def _is_new_and_possible(self, item: int) -> bool:
        state = (item, tuple(sorted(self._rows)))
        if state in self._seen:
            return False
        self._seen.add(state)
        seconds = sum(max(0.0, self._limit - self._row_seconds(row)) for row in self._rows)
        tokens = sum(self._scheme.max_length - row[0] for row in self._rows)
        return seconds >= self._seconds_left[item] * (1 - EPSILON) and tokens >= self._tokens_left[item]

    def _choices(self) -> list[int]:
        """Return the rows to try, least busy first, one of those that are alike."""
        different = {state: row for row, state in reversed(list(enumerate(self._rows)))}
        return [different[state] for state in sorted(different, key=self._row_seconds)]

    @property
    def _limit(self) -> float:
        return self._below * (1 - EPSILON)

    def _row_seconds(self, row: _State) -> float:
        return self._scheme.times.a * row[1] + self._scheme.times.b * row[0]
