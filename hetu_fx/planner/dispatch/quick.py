"""Rows by longest-first, for the best number of rows: a packing in a fraction of a millisecond."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from hetu_fx.planner.dispatch.strategy import Scheme


class RowAssignment(NamedTuple):
    """Seconds of a pipeline by (3) of the cost model, and the row of each sequence."""

    seconds: float
    row_of: tuple[int, ...]


NO_ROWS = RowAssignment(math.inf, ())

_SLACK = 0.005  # a number of rows that cannot be better by this share is not tried


def quick_rows(scheme: Scheme, lengths: Sequence[int]) -> RowAssignment:
    """Return the rows by longest-first for the best number of rows, nearly; `lengths` fall."""
    best = NO_ROWS

    def try_count(count: int) -> float:
        nonlocal best
        best = min(best, _longest_first(scheme, lengths, seconds, count), key=lambda rows: rows.seconds)
        return best.seconds * (1 - _SLACK)

    seconds = [scheme.times.seconds(length) for length in lengths]
    sweep_counts(scheme, lengths, seconds, try_count)
    return best if lengths else RowAssignment(0.0, ())


def sweep_counts(
    scheme: Scheme, lengths: Sequence[int], seconds: Sequence[float], try_count: Callable[[int], float]
) -> None:
    """Try numbers of rows, least bound on (3) of the cost model first, while that is below a target.

    At least as many rows as the tokens need, at most one per sequence and as few as keep the devices busy;
    more only while the target is infinite. `try_count` returns the target from then on. `lengths` fall.
    """
    if not lengths:
        return
    tokens, total, target = sum(lengths), sum(seconds), math.inf
    least = -(-tokens // scheme.max_length)
    most = max(least, min(len(lengths), tokens // scheme.filling_tokens))
    counts = range(least, most + 1)
    for bound, count in sorted((scheme.seconds(max(total / count, seconds[0]), count), count) for count in counts):
        if bound >= target:
            return
        target = try_count(count)
    while math.isinf(target):
        most += 1
        target = try_count(most)


def _longest_first(scheme: Scheme, lengths: Sequence[int], seconds: Sequence[float], count: int) -> RowAssignment:
    """Place each sequence in the row that is done first among those with room; `NO_ROWS` when there is none."""
    heap, room, row_of = [(0.0, row) for row in range(count)], [scheme.max_length] * count, []
    for length, time in zip(lengths, seconds, strict=True):
        full = []
        while heap and room[heap[0][1]] < length:
            full.append(heappop(heap))
        if not heap:
            return NO_ROWS
        done, row = heap[0]
        heapreplace(heap, (done + time, row))
        room[row] -= length
        row_of.append(row)
        for entry in full:
            heappush(heap, entry)
    return RowAssignment(scheme.seconds(max(heap)[0], count), tuple(row_of))
