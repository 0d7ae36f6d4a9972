"""A pool of strategies, one per longest sequence that a batch may have: Hydraulis' interval programme.

For n devices and sequences of at most s tokens, let t(n, s) be the seconds of the last pipeline when lengths
are cut into intervals and d pipelines of a scheme k share the sequences of an interval (r, s]:

    t(n, 0) = 0                                                               (1)
    t(n, s) = min over k with max_length_k >= s, r < s and d with d g_k <= n of
              max( t(n - d g_k, r), max(work_k(r, s) / d, T_k(m)) + (p_k - 1) T_k(m) )   (2)

g_k being its devices (of each kind, where there are several), T_k(m) the seconds of a micro-batch of the longest
sequence m in the interval, and work_k the seconds of all its sequences, in rows that are full:

    work_k(r, s) = sum over lengths in (r, s] of count (a s^2 + b s + c s / max_length_k)      (3)

What t(N, s) comes from is the strategy for batches whose longest sequence has s tokens, or less than that and
more than the s before. This is the proposal of Hydraulis' planner, left in three places: it charges c for every
sequence as if none shared a row; it divides the fill by d with the rest, though every pipeline has its own; and
it knows no T_k(m) on the left, though sequences are not divided. It also counts a whole data set, so that fill
is nothing beside the work; counts of an average batch give it its weight. Devices may be left idle.

t does not fall as s grows, and the other side of the max in (2) does not grow with r, so the best r is where
they meet: found by bisection, for all k, d and s at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.makespan import Indices
from hetu_fx.planner.dispatch.scheme_costs import Numbers, Scheme, Strategy

ALIGNMENT = 128
"""Rows have whole multiples of so many tokens."""


@dataclass(frozen=True, slots=True)
class LengthVariant:
    """A strategy, and the longest sequence of the batches that it is for."""

    longest: int
    strategy: Strategy


def propose(
    schemes: Sequence[Scheme], counts: Mapping[int, float], devices: int | Sequence[int], *, step: int = ALIGNMENT
) -> tuple[LengthVariant, ...]:
    """Return the pool: by growing longest sequence, the strategy for batches with more than the one before.

    Args:
        schemes: what a pipeline may be.
        counts: how many sequences of each length a batch has on average.
        devices: so many may be used, of each kind of which the schemes say that there are several.
        step: the lengths of intervals are multiples of so many tokens.

    Raises `PlanError` for counts that cannot be, or a length that no scheme on so many devices holds.
    """
    if step < 1 or not counts or not all(n > 0 and 0 <= c < math.inf for n, c in counts.items()):
        raise PlanError(
            f"cannot propose strategies for counts {dict(counts)} in steps of {step}\n"
            f"hint: give counts of at least 0 by lengths from 1, and a step from 1"
        )
    most = (devices,) if isinstance(devices, int) else tuple(devices)
    usable = tuple(sorted(dict.fromkeys(s for s in schemes if _number_of(s, most)), key=str))
    held = max((scheme.max_length for scheme in usable), default=0)
    if max(counts) > held:
        raise PlanError(
            f"no scheme of at most {' + '.join(map(str, most))} devices holds {max(counts)} tokens, only up to {held}\n"
            f"hint: cut longer sequences, or give more devices"
        )
    proposal = _Proposal(usable, _Histogram(counts, step), most)
    ends = enumerate(proposal.histogram.ends[1:], 1)
    return tuple(LengthVariant(length, proposal.strategy(index)) for index, length in ends)


def _number_of(scheme: Scheme, devices: tuple[int, ...]) -> int:
    """Return how many pipelines of a scheme there are devices for."""
    pairs = zip(devices, scheme.by_kind, strict=True)
    return min(count // taken for count, taken in pairs if taken)


class _Histogram:
    """Sums over all lengths up to each of `ends` (0, step, 2 step, ..., longest): what (3) needs."""

    def __init__(self, counts: Mapping[int, float], step: int) -> None:
        lengths = np.array(sorted(counts), dtype=np.float64)
        number = np.array([counts[length] for length in sorted(counts)])
        self.ends = [*range(0, max(counts), step), max(counts)]
        last = np.searchsorted(lengths, self.ends, side="right")
        self._tokens, self._squares = (
            np.concatenate([[0.0], np.cumsum(number * lengths**power)])[last] for power in (1, 2)
        )
        present = np.maximum.accumulate(np.concatenate([[0.0], np.where(number > 0, lengths, 0.0)]))
        self._longest = present[last]

    def work(self, scheme: Scheme) -> Numbers:
        """Return the seconds of all sequences up to each end."""
        times = scheme.times
        result: Numbers = (times.b + times.c / scheme.max_length) * self._tokens + times.a * self._squares
        return result

    def longest_seconds(self, scheme: Scheme) -> Numbers:
        """Return the seconds of a micro-batch of the longest sequence up to each end."""
        result: Numbers = scheme.times.all_seconds(self._longest.tolist()) + scheme.times.c
        return result

    @property
    def is_empty(self) -> NDArray[np.bool_]:
        """Tell for (end, start) if no sequence is longer than the start and at most the end."""
        return self._longest[:, None] <= np.array(self.ends)


class _Proposal:
    """The table of (2), all numbers of devices of each kind and all ends, and where each entry comes from."""

    def __init__(self, schemes: Sequence[Scheme], histogram: _Histogram, devices: tuple[int, ...]) -> None:
        self.histogram, self._schemes = histogram, schemes
        pairs = [(k, d) for k, s in enumerate(schemes) for d in range(1, _number_of(s, devices) + 1)]
        self._pairs = sorted(pairs, key=lambda pair: (schemes[pair[0]].devices * pair[1], pair))
        taken = np.array([[count * d for count in schemes[k].by_kind] for k, d in self._pairs])
        units = np.maximum(1, np.gcd.reduce(taken, axis=0))
        self._taken, self._most = taken // units, tuple(int(n) for n in np.array(devices) // units)
        self._fill_table()

    def strategy(self, end: int) -> Strategy:
        """Trace the strategy for sequences up to an end."""
        pipelines: list[Scheme] = []
        left = np.array(self._most)
        while end:
            pair, start = self._pair[(*left, end)], self._start[(*left, end)]
            kind, count = self._pairs[pair]
            pipelines += [self._schemes[kind]] * count
            left, end = left - self._taken[pair], start
        return Strategy(tuple(pipelines))

    def _fill_table(self) -> None:
        ends = np.array(self.histogram.ends)
        shape = (*(most + 1 for most in self._most), len(ends))
        self._table, self._pair, self._start = np.full(shape, np.inf), np.zeros(shape, int), np.zeros(shape, int)
        self._table[..., 0] = 0.0
        kinds = np.array([kind for kind, _ in self._pairs])
        holds = ends <= np.array([scheme.max_length for scheme in self._schemes])[kinds, None]
        every = np.arange(len(ends))
        for devices in itertools.product(*(range(most + 1) for most in self._most)):
            able = np.flatnonzero((self._taken <= devices).all(axis=1))
            if not len(able):
                continue
            before = self._table[tuple((np.array(devices) - self._taken[able]).T)]
            start, seconds = self._best_starts(able, before)
            seconds[~holds[able]] = np.inf
            best = seconds.argmin(axis=0)
            self._table[devices][1:] = seconds[best, every][1:]
            self._pair[devices], self._start[devices] = able[best], start[best, every]

    def _best_starts(self, able: Indices, before: Numbers) -> tuple[Indices, Numbers]:
        """Return the best r of (2) and its seconds, (pairs, ends), of some pairs.

        `before` (pairs, ends) is t for the devices that each pair leaves.
        """
        costs = _Costs(self._schemes, self.histogram, [self._pairs[pair] for pair in able])
        low = np.zeros(before.shape, int)
        high = np.tile(np.arange(before.shape[1]), (len(able), 1))
        while (low < high).any():  # the first r whose left side reaches the right one lies in [low, high]
            middle = (low + high) // 2
            reached = np.take_along_axis(before, middle, axis=1) >= costs.seconds(middle)
            high, low = np.where(reached, middle, high), np.where(reached | (low >= high), low, middle + 1)
        starts = np.stack([np.maximum(low - 1, 0), np.minimum(low, np.maximum(np.arange(before.shape[1]) - 1, 0))])
        both = np.stack([np.maximum(np.take_along_axis(before, r, axis=1), costs.seconds(r)) for r in starts])
        which = both.argmin(axis=0)[None]
        return np.take_along_axis(starts, which, axis=0)[0], np.take_along_axis(both, which, axis=0)[0]


class _Costs:
    """The right side of (2) for pairs of a scheme and a number of pipelines."""

    def __init__(self, schemes: Sequence[Scheme], histogram: _Histogram, pairs: Sequence[tuple[int, int]]) -> None:
        self._work = np.stack([histogram.work(schemes[kind]) for kind, _ in pairs])
        self._longest = np.stack([histogram.longest_seconds(schemes[kind]) for kind, _ in pairs])
        self._pipelines = np.array([[float(count)] for _, count in pairs])
        self._fill = np.array([[schemes[kind].fill] for kind, _ in pairs])
        self._is_empty = histogram.is_empty

    def seconds(self, starts: Indices) -> Numbers:
        """Return the seconds (pairs, ends) of the intervals that begin after the ends at `starts`."""
        work = (self._work - np.take_along_axis(self._work, starts, axis=1)) / self._pipelines
        longest = np.where(self._is_empty[np.arange(starts.shape[1]), starts], 0.0, self._longest)
        result: Numbers = np.maximum(work, longest) + self._fill * longest
        return result
