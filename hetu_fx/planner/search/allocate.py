"""Exact integer min-max allocation: rows to replicas, units to shards, blocks to stages.

Spread (rows, units): find x_1 .. x_n, whole numbers with low_i <= x_i <= high_i and sum x_i = total   (1)
that minimise max_i t_i(x_i), each t_i non-decreasing.                                                 (2)
The optimum is t_i(x) for some i and x, so bisection over those values is exact, without tolerances.

Cut (blocks): find 0 = k_0 < k_1 < ... < k_n = total that minimise max_i c_i(k_{i-1}, k_i).             (3)
Dynamic programming over (i, k_i) is exact for any c_i; blocks that are all alike are dealt instead.

Exact integer min-max allocation where each receiver needs the same for every unit.

Find whole numbers n_i with low_i <= n_i <= high_i and sum n_i = total that minimise max_i y_i n_i: the linear
case of `allocate.spread`, for a search that asks a hundred thousand times. Both lower-level programs of
Malleus are this: layers to stages (y = seconds per layer) and micro-batches to pipelines (y = the
bottleneck). The released planner gives each to an integer linear program.

The optimum takes the `total` cheapest units, unit k of receiver i costing y_i k. No receiver takes less than
the relaxed optimum total / sum_i 1 / y_i allows, so only the few units beyond it are ordered.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache

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
    return _given_back([most[key] for key in keys], [receivers[key] for key in keys], total)


def _given_back(counts: list[int], receivers: Sequence[_Receiver], total: int) -> tuple[int, ...]:
    """Return the counts less what is too much, taken one by one from who is the latest."""
    pairs = list(enumerate(zip(counts, receivers, strict=True)))
    heap = [(-one.seconds(count), -index) for index, (count, one) in pairs if count > one.low]
    heapq.heapify(heap)
    for _ in range(sum(counts) - total):
        index = -heapq.heappop(heap)[1]
        counts[index] -= 1
        if counts[index] > receivers[index].low:
            heapq.heappush(heap, (-receivers[index].seconds(counts[index]), -index))
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
    counts = [1] * num_stages
    heap = [(taking(index, 2), -index) for index in range(num_stages)]
    heapq.heapify(heap)
    for _ in range(total - num_stages):
        _, place = heap[0]
        counts[-place] += 1
        heapq.heapreplace(heap, (taking(-place, counts[-place] + 1), place))
    fits = all(taking(index, count) < math.inf for index, count in enumerate(counts))
    return tuple(counts) if fits else None


def cut(total: int, num_stages: int, seconds: RangeSeconds) -> tuple[int, ...] | None:
    """Return the sizes of the consecutive ranges that solve (3), each at least 1.

    None when there are fewer items than stages, or every cut has an infinite cost (a stage that does not
    fit).
    """
    if total < num_stages:
        return None
    worst = [seconds(0, 0, stop) if stop else float("inf") for stop in range(total + 1)]
    choices: list[list[int]] = []
    for stage in range(1, num_stages):
        column = [_best_start(stage, stop, worst, seconds) for stop in range(total + 1)]
        choices.append([start for _, start in column])
        worst = [value for value, _ in column]
    return None if worst[total] == float("inf") else _sizes(total, choices)


def _best_start(stage: int, stop: int, worst: Sequence[float], seconds: RangeSeconds) -> tuple[float, int]:
    """Return (least max, start). No bisection: with items of unequal cost, `worst` may shrink when it grows.

    A start that is already too late on the left is skipped before its range is priced.
    """
    best = (float("inf"), stage)
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
    if surplus < 0:
        _add(counts, costs, high, -surplus)
    elif surplus > 0:
        _take(counts, costs, low, surplus)
    return tuple(counts)


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


def _add(counts: list[int], costs: Sequence[float], high: Sequence[int], number: int) -> None:
    """Give the cheapest units that are left."""
    heap = [(y * (n + 1), i) for i, (y, n, h) in enumerate(zip(costs, counts, high, strict=True)) if n < h]
    heapq.heapify(heap)
    for _ in range(number):
        _, i = heap[0]
        counts[i] += 1
        if counts[i] < high[i]:
            heapq.heapreplace(heap, (costs[i] * (counts[i] + 1), i))
        else:
            heapq.heappop(heap)


def _take(counts: list[int], costs: Sequence[float], low: Sequence[int], number: int) -> None:
    """Take back the most expensive units."""
    heap = [(-y * n, -i) for i, (y, n, least) in enumerate(zip(costs, counts, low, strict=True)) if n > least]
    heapq.heapify(heap)
    for _ in range(number):
        _, i = heap[0]
        i = -i
        counts[i] -= 1
        if counts[i] > low[i]:
            heapq.heapreplace(heap, (-costs[i] * counts[i], -i))
        else:
            heapq.heappop(heap)
