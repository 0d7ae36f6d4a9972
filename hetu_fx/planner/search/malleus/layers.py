"""How many layers each stage of a pipeline gets (Malleus' lower level), and all pipelines that given groups can make.

Stages are given as kinds of groups. Minimise the bottleneck o = max_j y_j l_j over whole l_j with sum_j l_j = L, within
memory. A stage that gets no layer is no stage: its devices stand by, and the next one becomes the first. Slow stages
stand in front, where 1F1B keeps most activations, as they hold few layers; where memory binds, the order by y times the
group's size is tried too (a split group of healthy devices is no straggler, but has little memory).

The exact search for a placement takes pipelines in order of their loss. With C_i the capacity of a pipeline (sum of
1 / y), its bottleneck o_i is at least L / C_i. So a pipeline that is to be done before T loses

    loss_i = T C_i / L - (most micro-batches m with m o_i < T)  >=  0                            (1)

micro-batches to rounding and memory, and a placement faster than T exists exactly when some has

    sum_i loss_i <= T sum_i C_i / L - M.                                                         (2)

The order of loss skips permutations of pipelines; the least of d pipelines' losses is at most a d-th of what (2)
leaves, which prunes. The last two are found in one go.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetu_fx.planner.search.allocate import spread_evenly
from hetu_fx.planner.search.malleus.device_groups import GroupKind
from hetu_fx.planner.search.malleus.situation import MalleusSituation

MOST_PIPELINES = 20_000
"""The exact search is left out when more different pipelines can be made of the groups."""

MOST_STEPS = 1_000_000
"""Pipelines that the exact search looks at, over a whole search, before it gives up proving."""

_CHOICE = 100  # a choice costs as much as looking at so many pipelines

_EPSILON = 1e-9
_BELOW = 1 - 1e-12  # a product that equals T is not below it, however it is rounded

Kinds = tuple[GroupKind, ...]


@dataclass(frozen=True, slots=True)
class FilledPipeline:
    """A pipeline's stages in order, the layers of each (1 or more), and its bottleneck seconds o."""

    kinds: Kinds
    layers: tuple[int, ...]
    bottleneck: float

    @property
    def fill_seconds(self) -> float:
        """Return the seconds of one micro-batch through all stages."""
        return math.fsum(kind.seconds * n for kind, n in zip(self.kinds, self.layers, strict=True))


class LayerFiller:
    """Fills pipelines with layers; remembers what it has filled."""

    def __init__(self, situation: MalleusSituation) -> None:
        self._situation = situation
        self._found: dict[Kinds, FilledPipeline | None] = {}

    @property
    def num_filled(self) -> int:
        """Return how many different pipelines were filled."""
        return len(self._found)

    def fill(self, kinds: Kinds) -> FilledPipeline | None:
        """Return the best filling with some of these groups (slowest first), or None when none fits memory."""
        if kinds not in self._found:
            self._found[kinds] = self._fill(kinds)
        return self._found[kinds]

    def _fill(self, kinds: Kinds) -> FilledPipeline | None:
        best = self._in_order(kinds)
        relaxed = self._situation.num_layers / math.fsum(1 / kind.seconds for kind in kinds) if kinds else math.inf
        if self._situation.memory is not None and (best is None or best.bottleneck > relaxed + kinds[0].seconds):
            weighted = sorted(kinds, key=lambda kind: (-kind.seconds * kind.size, kind))
            best = _better(best, self._in_order(tuple(weighted)))
        return _better(best, self._without_slowest(kinds, best))

    def _without_slowest(self, kinds: Kinds, best: FilledPipeline | None) -> FilledPipeline | None:
        """Return a filling without the slowest group, where its one layer is what bounds the pipeline."""
        if len(kinds) > 1 and (best is None or best.bottleneck == kinds[0].seconds):
            return self.fill(kinds[1:])
        return None

    def _in_order(self, kinds: Kinds) -> FilledPipeline | None:
        seconds = [kind.seconds for kind in kinds]
        layers = spread_evenly(self._situation.num_layers, seconds, [1] * len(kinds), self._most_layers(kinds))
        if layers is None:
            return None
        return FilledPipeline(kinds, layers, max(y * n for y, n in zip(seconds, layers, strict=True)))

    def _most_layers(self, kinds: Kinds) -> Sequence[int]:
        memory, last = self._situation.memory, len(kinds) - 1
        if memory is None:
            return ()
        rooms = [kind.room_bytes - (memory.edge_bytes if j in (0, last) else 0.0) for j, kind in enumerate(kinds)]
        return [max(0, int(room / memory.at(last - j))) for j, room in enumerate(rooms)]


def _better(one: FilledPipeline | None, other: FilledPipeline | None) -> FilledPipeline | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda filled: (filled.bottleneck, len(filled.kinds)))


@dataclass(slots=True)
class Budget:
    """How many units of work are left."""

    left: int

    def take(self, units: int) -> bool:
        """Use units up; False when there are no more."""
        self.left -= units
        return self.left > 0


def most_below(filled: FilledPipeline, seconds: float) -> int:
    """Return the most micro-batches that a pipeline does in less than `seconds`; 0 if fewer than it has stages."""
    most = math.ceil(seconds / filled.bottleneck * _BELOW) - 1
    return most if most >= len(filled.kinds) else 0


def micro_batches_within(filled: FilledPipeline, seconds: float) -> int:
    """Return the most micro-batches that a pipeline does in no more than `seconds`; 0 if fewer than it has stages."""
    most = math.floor(seconds / filled.bottleneck / _BELOW)
    return most if most >= len(filled.kinds) else 0


@dataclass(frozen=True, slots=True)
class _Left:
    """What is left to choose: so many pipelines of row `rest`, from a position in the order of loss, within a slack."""

    start: int
    rest: int
    number: int
    slack: float


@dataclass(slots=True)
class _Choice:
    """A pipeline to be chosen: what is left, the (positions, rows) that were not tried yet, and the row that it has."""

    left: _Left
    rows: Iterator[tuple[int, int]]
    row: int = 0


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
        low, high = (np.full(len(self._counts), number) for number in (0, len(values)))
        for _ in range(len(values).bit_length()):
            middle = np.minimum((low + high) // 2, len(values) - 1)
            columns = zip(self._counts.T, fitting, strict=True)
            held = sum((column * fits[middle] for column, fits in columns), np.zeros(len(self._counts)))
            high = np.where(held >= self._situation.num_layers, middle, high)
            low = np.where(held >= self._situation.num_layers, low, middle + 1)
        bottlenecks: NDArray[np.float64] = np.append(values, np.inf)[high]
        return bottlenecks

    def find(self, below: float) -> list[FilledPipeline] | None:
        """Return pipelines that take less than `below` seconds by (2), or None; is_complete says if that is sure."""
        self._below = below
        if below == math.inf:
            below = self._below = 1e6 * self._situation.num_micro_batches * float(self._bottleneck[1:].min())
        self._loss = self._losses()
        self._order = np.argsort(self._loss, kind="stable")
        self._sorted = self._loss[self._order].copy()
        whole = len(self._counts) - 1
        slack = below * self._capacity[whole] / self._situation.num_layers - self._situation.num_micro_batches
        rows = self._choose(whole, self._situation.num_pipelines, float(slack) + _EPSILON)
        return None if rows is None else [self._filled(row) for row in rows]

    def _losses(self) -> NDArray[np.float64]:
        """Return (1) of each row; infinite where there are fewer micro-batches than stages."""
        most = np.ceil(self._below / self._bottleneck * _BELOW) - 1
        share = self._below * self._capacity / self._situation.num_layers
        losses: NDArray[np.float64] = np.where(most >= self._stages, share - most, np.inf)
        return losses

    def _loss_of(self, row: int, filled: FilledPipeline | None) -> float:
        """Return (1) of one row, with memory."""
        most = 0 if filled is None else most_below(filled, self._below)
        share = self._below * float(self._capacity[row]) / self._situation.num_layers
        return share - most if most else math.inf

    def _choose(self, whole: int, number: int, slack: float) -> list[int] | None:
        """Return the rows of `number` pipelines made of row `whole`, in the order of loss; there may be thousands."""
        chosen: list[_Choice] = []
        found = self._ends_with(_Left(0, whole, number, slack), chosen)
        while found is None and chosen:
            after = self._next(chosen[-1])
            if after is None:
                chosen.pop()
            else:
                found = self._ends_with(after, chosen)
        return None if found is None else [*(choice.row for choice in chosen), *found]

    def _ends_with(self, left: _Left, chosen: list[_Choice]) -> list[int] | None:
        """Return the last rows where only one or two pipelines are left; else note that one is to be chosen."""
        if left.number == 1:
            return [left.rest] if self._is_within([left.rest], left.slack) else None
        stop = int(np.searchsorted(self._sorted, left.slack / left.number, side="right"))
        if not self._steps.take(_CHOICE + stop - left.start):
            self.is_complete = False
            return None
        window = self._order[left.start : stop]
        fits = (self._counts[window] <= self._counts[left.rest]).all(axis=1) & (window > 0) & (window < left.rest)
        positions = np.flatnonzero(fits)
        if left.number == 2:
            return self._last_two(window[positions], left.rest, left.slack)
        chosen.append(_Choice(left, iter(zip(positions.tolist(), window[positions].tolist(), strict=True))))
        return None

    def _next(self, choice: _Choice) -> _Left | None:
        """Take the next row that fits for a pipeline, and return what it leaves; None when there is no other."""
        left = choice.left
        for position, row in choice.rows:
            if self._is_within([row], left.slack / left.number):
                choice.row = row
                slack = left.slack - float(self._loss[row])
                return _Left(left.start + position, left.rest - row, left.number - 1, slack)
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

    def _filled(self, row: int) -> FilledPipeline:
        filled = self._filler.fill(self._kinds_of(row))
        assert filled is not None
        return filled

    def _kinds_of(self, row: int) -> Kinds:
        pairs = zip(self._kinds, self._counts[row].tolist(), strict=True)
        return tuple(kind for kind, count in pairs for _ in range(count))
