"""Exact integer min-max allocation where each receiver needs the same for every unit.

Find whole numbers n_i with low_i <= n_i <= high_i and sum n_i = total that minimise max_i y_i n_i: the linear
case of `allocate.spread`, for a search that asks a hundred thousand times. Both lower-level programs of
Malleus are this: layers to stages (y = seconds per layer) and micro-batches to pipelines (y = the
bottleneck). The released planner gives each to an integer linear program.

The optimum takes the `total` cheapest units, unit k of receiver i costing y_i k. No receiver takes less than
the relaxed optimum total / sum_i 1 / y_i allows, so only the few units beyond it are ordered.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

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
