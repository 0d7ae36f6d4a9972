"""Exact integer min-max allocation: rows to replicas, units to shards, blocks to stages.

Spread (rows, units): find x_1 .. x_n, whole numbers with low_i <= x_i <= high_i and sum x_i = total   (1)
that minimise max_i t_i(x_i), each t_i non-decreasing.                                                 (2)
The optimum is t_i(x) for some i and x, so bisection over those values is exact, without tolerances.

Spread evenly: the same with t_i(x) = y_i x, for a search that asks a hundred thousand times. Both lower-level programs
of Malleus are this: layers to stages (y = seconds per layer) and micro-batches to pipelines (y = the bottleneck); the
released planner gives each to an integer linear program. The optimum takes the `total` cheapest units, unit k of
receiver i costing y_i k. No receiver takes less than the relaxed optimum total / sum_i 1 / y_i allows, so only the few
units beyond it are ordered.

Cut (blocks): find 0 = k_0 < k_1 < ... < k_n = total that minimise max_i c_i(k_{i-1}, k_i).             (3)
Dynamic programming over (i, k_i) is exact for any c_i; blocks that are all alike are dealt instead, one by one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial

from hetu_fx.planner.values.line import Line

Seconds = Callable[[int], float]
"""Seconds one receiver needs for a count; must not decrease with the count."""

RangeSeconds = Callable[[int, int, int], float]
"""Seconds that stage i needs for the blocks [start, stop)."""


@dataclass(frozen=True, slots=True)
class _Receiver:
    """Receivers that are alike: what one of them takes for a count, its limits, and how many there are."""

    seconds: Seconds
    low: int
    high: int
    number: int

    def most(self, deadline: float) -> int:
        """Return the most that one can take by the deadline; `low - 1` when not even `low`."""
        counts = range(self.low, self.high + 1)
        return self.low - 1 + bisect_left(counts, True, key=lambda count: self.seconds(count) > deadline)

    def least_deadline(self, total: int, receivers: Sequence[_Receiver], below: float) -> float:
        """Return the least that one takes for a count by which everything can be taken, or `below` if that is less."""
        counts = range(self.low, self.high + 1)
        near = bisect_left(counts, True, key=lambda count: self.seconds(count) >= below)
        if not near or not _can_take(total, receivers, self.seconds(counts[near - 1])):
            return below
        fits = bisect_left(counts[: near - 1], True, key=lambda count: _can_take(total, receivers, self.seconds(count)))
        return self.seconds(counts[fits])


def _can_take(total: int, receivers: Sequence[_Receiver], deadline: float) -> bool:
    """Tell whether (1) has a solution in which nobody is later than the deadline."""
    most = [one.most(deadline) for one in receivers]
    pairs = list(zip(most, receivers, strict=True))
    return all(m >= one.low for m, one in pairs) and sum(m * one.number for m, one in pairs) >= total


def spread(
    total: int, costs: Sequence[Seconds], *, low: Sequence[int] = (), high: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Return the counts that solve (1) and (2), or None when the limits allow none.

    `low` defaults to 0 and `high` to `total` for each. Among the solutions of equal maximum, the surplus is
    taken back from the latest receivers, so the result is deterministic. Receivers of one and the same cost are worked
    out once.
    """
    low = tuple(low) or (0,) * len(costs)
    high = tuple(min(total, h) for h in high) if high else (total,) * len(costs)
    if sum(low) > total or sum(high) < total or any(h < floor for h, floor in zip(high, low, strict=True)):
        return None
    keys = list(zip(costs, low, high, strict=True))
    receivers = {key: _Receiver(cache(key[0]), *key[1:], number) for key, number in Counter(keys).items()}
    deadline, unlike = math.inf, list(receivers.values())
    for one in unlike:
        deadline = one.least_deadline(total, unlike, deadline)
    most = {key: one.most(deadline) for key, one in receivers.items()}
    counts, by_index = [most[key] for key in keys], [receivers[key].seconds for key in keys]
    return _taken_back(counts, low, lambda index, count: by_index[index](count), sum(counts) - total)


def spread_by_speed(total: int, speeds: Sequence[float], least: int = 1) -> tuple[int, ...] | None:
    """Return the counts, `least` at least, that let receivers of these speeds end together."""
    return spread(total, [partial(_seconds_at, speed) for speed in speeds], low=(least,) * len(speeds))


def _seconds_at(speed: float, count: int) -> float:
    return count / speed


def _taken_back(
    counts: list[int], low: Sequence[int], seconds: Callable[[int, int], float], number: int
) -> tuple[int, ...]:
    """Return the counts less so many, taken one by one from who is the latest, of equals from the last one."""
    heap = [(-seconds(index, count), -index) for index, count in enumerate(counts) if count > low[index]]
    heapq.heapify(heap)
    for _ in range(number):
        index = -heap[0][1]
        counts[index] -= 1
        if counts[index] > low[index]:
            heapq.heapreplace(heap, (-seconds(index, counts[index]), -index))
        else:
            heapq.heappop(heap)
    return tuple(counts)


def _given(
    counts: list[int], high: Sequence[int], seconds: Callable[[int, int], float], number: int, first: int = 1
) -> tuple[int, ...]:
    """Return the counts and so many more, each given to who is done first with it.

    Of equals that is the first one, or the last one where `first` is -1.
    """
    heap = [(seconds(index, count + 1), first * index) for index, count in enumerate(counts) if count < high[index]]
    heapq.heapify(heap)
    for _ in range(number):
        place = heap[0][1]
        index = first * place
        counts[index] += 1
        if counts[index] < high[index]:
            heapq.heapreplace(heap, (seconds(index, counts[index] + 1), place))
        else:
            heapq.heappop(heap)
    return tuple(counts)


def deal(total: int, num_stages: int, seconds: RangeSeconds) -> tuple[int, ...] | None:
    """Return the sizes that solve (3) where only the first and the last item differ from the others.

    Each stage gets one, and each further one goes to the stage that would then be done first, which is exact for
    costs that do not fall. None when there are fewer items than stages, or they do not fit.
    """

    def taking(index: int, count: int) -> float:
        start = 0 if index == 0 else total - count if index == num_stages - 1 else 1
        return seconds(index, start, start + count)

    if num_stages == 1:
        return (total,) if seconds(0, 0, total) < math.inf else None
    if total < num_stages:
        return None
    counts = _given([1] * num_stages, [total] * num_stages, taking, total - num_stages, first=-1)
    fits = all(taking(index, count) < math.inf for index, count in enumerate(counts))
    return counts if fits else None


def min_max_ranges(total: int, num_stages: int, seconds: RangeSeconds) -> tuple[int, ...] | None:
    """Return the sizes of the consecutive ranges that solve (3), each at least 1.

    None when there are fewer items than stages, or every cut has an infinite cost (a stage that does not
    fit).
    """
    if total < num_stages:
        return None
    worst = [seconds(0, 0, stop) if stop else math.inf for stop in range(total + 1)]
    choices: list[list[int]] = []
    for stage in range(1, num_stages):
        column = [_best_start(stage, stop, worst, seconds) for stop in range(total + 1)]
        choices.append([start for _, start in column])
        worst = [value for value, _ in column]
    return None if worst[total] == math.inf else _sizes(total, choices)


def _best_start(stage: int, stop: int, worst: Sequence[float], seconds: RangeSeconds) -> tuple[float, int]:
    """Return (least max, start). No bisection: with items of unequal cost, `worst` may shrink when it grows.

    A start that is already too late on the left is skipped before its range is priced.
    """
    best = (math.inf, stage)
    for start in range(stop - 1, stage - 1, -1):
        if worst[start] < best[0]:
            best = min(best, (max(worst[start], seconds(stage, start, stop)), start))
    return best


def _sizes(total: int, choices: Sequence[Sequence[int]]) -> tuple[int, ...]:
    stops = [total]
    for column in reversed(choices):
        stops.append(column[stops[-1]])
    stops.append(0)
    return tuple(stop - start for stop, start in itertools.pairwise(stops))[::-1]


_BELOW = 1 - 1e-12  # what rounding may have added to the relaxed optimum


def spread_evenly(
    total: int, costs: Sequence[float], low: Sequence[int] = (), high: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Return the counts of least maximum cost, or None when the limits allow none.

    `low` defaults to 0 and `high` to `total`. Equal costs go to the earlier receiver.
    """
    low = low or [0] * len(costs)
    high = high or [total] * len(costs)
    if sum(low) > total or sum(high) < total or any(h < n for n, h in zip(low, high, strict=True)):
        return None
    level = total / sum(1 / cost for cost in costs) * _BELOW
    counts = [max(n, min(int(level / y), h)) for y, n, h in zip(costs, low, high, strict=True)]
    surplus = sum(counts) - total
    if surplus > 0:
        return _taken_back(counts, low, lambda index, count: costs[index] * count, surplus)
    return _given(counts, high, lambda index, count: costs[index] * count, -surplus) if surplus else tuple(counts)


Alike = Collection[tuple[Line, int]]
"""Lines, and how many are alike."""


def least_longest(total: int, lines: Alike) -> float:
    """Return the least time by which `total` items can be done, at least one by each line; infinite if there are fewer.

    A little less where some line takes longer for one item than others for their part.
    """
    if total < sum(number for _, number in lines):
        return math.inf
    level, left, heap = _level(total, lines) * _BELOW, total, list[tuple[float, float, int]]()
    for line, number in lines:
        count = max(1, int((level - line.fixed) / line.slope))
        heap.append((line(count + 1), line.slope, number))
        left -= number * count
    heapq.heapify(heap)
    while left > 0:
        level, slope, number = heap[0]
        heapq.heapreplace(heap, (level + slope, slope, number))
        left -= number
    return max(level, *(line(1) for line, _ in lines))


def least_passing(total: int, lines: Alike, weight: float) -> float:
    """Return what the sum of all times and `weight` times the longest come to at least, for `total` items.

    Within a limit on the longest, items are fastest where they take least time; the best limit is where lines of other
    slopes are no longer needed, or the least there is.
    """
    longest = least_longest(total, lines)
    if longest == math.inf:
        return math.inf
    order = sorted(lines, key=lambda pair: pair[0].slope)
    steps = [count for count in range(1, len(order)) if order[count][0].slope > order[count - 1][0].slope]
    limits = [longest, *(limit for count in steps if (limit := _level(total, order[:count])) > longest)]
    fixed = sum(number * line.fixed for line, number in lines)
    return fixed + min(weight * limit + _filled(total, order, limit) for limit in limits)


def _level(total: int, lines: Alike) -> float:
    """Return by when items, divided at will, are done."""
    fixed = sum(number * line.fixed / line.slope for line, number in lines)
    return (total + fixed) / sum(number / line.slope for line, number in lines)


def _filled(total: int, lines: Alike, limit: float) -> float:
    """Return the time of `total` items given to lines in order, as many as each does by the limit."""
    left, taken = float(total), 0.0
    for line, number in lines:
        count = min(left, number * max(0.0, (limit - line.fixed) / line.slope))
        left -= count
        taken += count * line.slope
    return taken
