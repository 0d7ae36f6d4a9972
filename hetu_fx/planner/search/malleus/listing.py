"""The exact search for a placement: all pipelines that can be made of given groups, in order of their loss.

With C_i the capacity of a pipeline (sum of 1 / y), its bottleneck o_i is at least L / C_i. So a pipeline that
is to be done before T loses

    loss_i = T C_i / L - (most micro-batches m with m o_i < T)  >=  0                            (1)

micro-batches to rounding and memory, and a placement faster than T exists exactly when some has

    sum_i loss_i <= T sum_i C_i / L - M.                                                         (2)

Pipelines are taken in order of loss, which skips permutations of pipelines; the least of d pipelines' losses
is at most a d-th of what (2) leaves, which prunes. The last two are found in one go.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetu_fx.planner.search.malleus.layers import Filled, Kinds, LayerFiller
from hetu_fx.planner.search.malleus.situation import MalleusSituation

MOST_PIPELINES = 20_000
"""The exact search is left out when more different pipelines can be made of the groups."""

MOST_STEPS = 1_000_000
"""Pipelines that the exact search looks at, over a whole search, before it gives up proving."""

_CHOICE = 100  # a choice costs as much as looking at so many pipelines

_EPSILON = 1e-9
_BELOW = 1 - 1e-12  # a product that equals T is not below it, however it is rounded


@dataclass(slots=True)
class Budget:
    """How many units of work are left."""

    left: int

    def take(self, units: int) -> bool:
        """Use units up; False when there are no more."""
        self.left -= units
        return self.left > 0


def most_below(filled: Filled, seconds: float) -> int:
    """Return the most micro-batches that a pipeline does in less than `seconds`; 0 if fewer than it has stages."""
    most = math.ceil(seconds / filled.bottleneck * _BELOW) - 1
    return most if most >= len(filled.kinds) else 0


class Listing:
    """All pipelines that can be made of groups, as rows of counts per kind, for the exact search.

    Rows stand in the order of their counts read as digits, so that the row of what is left after taking row v
    from row r is r - v. Bottlenecks are first those without memory limits, which are no larger; a row is
    filled with layers when the search takes it.
    """

    def __init__(self, situation: MalleusSituation, kinds: Kinds, filler: LayerFiller, steps: Budget) -> None:
        self._situation, self._filler, self._steps = situation, filler, steps
        self._totals = Counter(kinds)
        self._kinds = tuple(sorted(self._totals, reverse=True))
        sizes = [self._totals[kind] + 1 for kind in self._kinds]
        self.is_complete = math.prod(sizes) <= MOST_PIPELINES and steps.left > 0
        if not self.is_complete:
            return
        self._counts = np.indices(sizes).reshape(len(sizes), -1).T.astype(np.int64)
        # column by column and not as a product of matrices, so that every machine gets the same numbers
        columns = zip(self._counts.T, self._kinds, strict=True)
        self._capacity = sum((column / kind.seconds for column, kind in columns), np.zeros(len(self._counts)))
        self._bottleneck = self._without_memory()
        self._stages = np.ones(len(self._counts))
        self._is_filled = np.zeros(len(self._counts), dtype=bool)

    def _without_memory(self) -> NDArray[np.float64]:
        """Return the least bottleneck of each row, one of the products y l."""
        layers = np.arange(1, self._situation.num_layers + 1)
        values = np.unique(np.concatenate([kind.seconds * layers for kind in self._kinds]))
        seconds = np.array([kind.seconds for kind in self._kinds])[:, None]
        fitting = np.floor(values * (1 + 1e-12) / seconds)
        held = np.zeros(len(self._counts), dtype=np.int64)
        for part in np.array_split(np.arange(len(self._counts)), len(self._counts) // 1000 + 1):
            held[part] = (self._counts[part] @ fitting < self._situation.num_layers).sum(axis=1)
        return np.append(values, np.inf)[held]

    def find(self, below: float) -> list[Filled] | None:
        """Return pipelines that take less than `below` seconds by (2), or None; is_complete says if that is sure."""
        self._below = below
        if below == math.inf:
            below = self._below = 1e6 * self._situation.num_micro_batches * float(self._bottleneck[1:].min())
        self._loss = self._losses()
        self._order = np.argsort(self._loss, kind="stable")
        self._sorted = self._loss[self._order].copy()
        whole = len(self._counts) - 1
        slack = below * self._capacity[whole] / self._situation.num_layers - self._situation.num_micro_batches
        rows = self._choose(0, whole, self._situation.num_pipelines, float(slack) + _EPSILON)
        return None if rows is None else [self._filled(row) for row in rows]

    def _losses(self) -> NDArray[np.float64]:
        """Return (1) of each row; infinite where there are fewer micro-batches than stages."""
        most = np.ceil(self._below / self._bottleneck * _BELOW) - 1
        share = self._below * self._capacity / self._situation.num_layers
        losses: NDArray[np.float64] = np.where(most >= self._stages, share - most, np.inf)
        return losses

    def _loss_of(self, row: int, filled: Filled | None) -> float:
        """Return (1) of one row, with memory."""
        most = 0 if filled is None else most_below(filled, self._below)
        share = self._below * float(self._capacity[row]) / self._situation.num_layers
        return share - most if most else math.inf

    def _choose(self, start: int, rest: int, number: int, slack: float) -> list[int] | None:
        """Return the rows of `number` pipelines made of row `rest`, from position `start` in the order of loss."""
        if number == 1:
            return [rest] if self._is_within([rest], slack) else None
        stop = int(np.searchsorted(self._sorted, slack / number, side="right"))
        if not self._steps.take(_CHOICE + stop - start):
            self.is_complete = False
            return None
        window = self._order[start:stop]
        fits = (self._counts[window] <= self._counts[rest]).all(axis=1) & (window > 0) & (window < rest)
        positions = np.flatnonzero(fits)
        if number == 2:
            return self._last_two(window[positions], rest, slack)
        for position in positions.tolist():
            row = int(window[position])
            if self._is_within([row], slack / number):
                found = self._choose(start + position, rest - row, number - 1, slack - float(self._loss[row]))
                if found is not None:
                    return [row, *found]
        return None

    def _last_two(self, rows: NDArray[np.int64], rest: int, slack: float) -> list[int] | None:
        total = self._loss[rows] + self._loss[rest - rows]
        for index in np.argsort(total, kind="stable").tolist():
            if total[index] > slack:
                return None
            pair = [int(rows[index]), rest - int(rows[index])]
            if self._is_within(pair, slack):
                return pair
        return None

    def _is_within(self, rows: Sequence[int], slack: float) -> bool:
        """Fill these rows with layers and tell whether they still lose no more than `slack`."""
        for row in rows:
            self._fill(row)
        return sum(float(self._loss[row]) for row in rows) <= slack

    def _fill(self, row: int) -> None:
        if self._is_filled[row] or self._loss[row] == math.inf:
            return
        filled = self._filler.fill(self._kinds_of(row))
        self._is_filled[row] = True
        self._bottleneck[row] = math.inf if filled is None else filled.bottleneck
        self._stages[row] = 1 if filled is None else len(filled.kinds)
        self._loss[row] = self._loss_of(row, filled)

    def _filled(self, row: int) -> Filled:
        filled = self._filler.fill(self._kinds_of(row))
        assert filled is not None
        return filled

    def _kinds_of(self, row: int) -> Kinds:
        pairs = zip(self._kinds, self._counts[row].tolist(), strict=True)
        return tuple(kind for kind, count in pairs for _ in range(count))
