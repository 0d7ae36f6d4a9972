"""Dispatches by what sequences add to rows, and rows by longest-first, in a few milliseconds.

Attention is paid for runs of tokens that attend to each other. Where these are sequences, one of s tokens in a row of
w adds its own seconds and its part of what a micro-batch costs besides, a s^2 + b s + c s / w: the least in the longest
row that a pipeline holds. Where they are whole rows, a token of a row of w takes a w + b + c / w: the least at
w = sqrt(c / a), as shorter rows are more micro-batches and longer ones more pairs of tokens. So a sequence of s tokens
adds at least

    t(s) = s (a r + b + c / w)                                                (1)

with r = s and w what a row holds; or r = w = sqrt(c / a), but s at least and what a row holds at most. Sequences are
dispatched by (1) in place of the cost model's seconds of a sequence.

Rows of sequences are filled by seconds (`quick_rows`). For whole rows, the sequences of a pipeline are put into v rows,
longest first, each where the fewest tokens are. v is tried in the order of what v rows take at least: the longest
sequences have a row each while they are longer than the mean of the others, which share theirs equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from hetu_fx.planner.dispatch.makespan import Assigning, Effort, assign
from hetu_fx.planner.dispatch.scheme_costs import Numbers, Scheme

Groups = tuple[tuple[int, ...], ...]


class RowAssignment(NamedTuple):
    """Seconds of a pipeline by (3) of the cost model, and the row of each sequence."""

    seconds: float
    row_of: tuple[int, ...]


NO_ROWS = RowAssignment(math.inf, ())

_QUICK_SLACK = 0.005  # a number of rows that cannot be better by this share is not tried


def quick_rows(scheme: Scheme, lengths: Sequence[int]) -> RowAssignment:
    """Return the rows by longest-first for the best number of rows, nearly; `lengths` fall."""
    best = NO_ROWS

    def try_count(count: int) -> float:
        nonlocal best
        slowest, row_of = _longest_first(lengths, seconds, count, scheme.max_length)
        found = RowAssignment(scheme.seconds(slowest, count), tuple(row_of))
        best = min(best, found, key=lambda rows: rows.seconds)
        return best.seconds * (1 - _QUICK_SLACK)

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


def _longest_first(lengths: Sequence[int], seconds: Sequence[float], count: int, room: int) -> tuple[float, list[int]]:
    """Place each sequence in the row that is done first among those with room.

    Returns the seconds of the slowest row and the row of each sequence; infinity and none where one has no room.
    """
    heap, left, row_of = [(0.0, row) for row in range(count)], [room] * count, list[int]()
    for length, time in zip(lengths, seconds, strict=True):
        full = []
        while heap and left[heap[0][1]] < length:
            full.append(heappop(heap))
        if not heap:
            return math.inf, []
        done, row = heap[0]
        heapreplace(heap, (done + time, row))
        left[row] -= length
        row_of.append(row)
        for entry in full:
            heappush(heap, entry)
    return max(heap)[0], row_of


def group_by_row(items: Sequence[int], row_of: Sequence[int]) -> Groups:
    """Return what is in each row, in the order of the items; no row is left out."""
    rows: list[list[int]] = [[] for _ in range(1 + max(row_of, default=-1))]
    for item, row in zip(items, row_of, strict=True):
        rows[row].append(item)
    return tuple(map(tuple, rows))


_RESTARTS = 2
_ENOUGH = 0.005  # a dispatch that misses its bound by this share is good enough: rows are not all of the best width
_SLACK = 1e-3  # a number of rows that cannot be better by this share is not tried


def least_seconds(scheme: Scheme, lengths: Sequence[int], *, whole_rows: bool) -> Numbers:
    """Return (1) for sequences of these lengths, shape (sequences,); what a longer one than a row holds adds too."""
    times, tokens = scheme.times, np.array(lengths, dtype=np.float64)
    best = math.sqrt(times.c / times.a) if whole_rows and times.a else math.inf
    width = np.maximum(tokens, min(best, scheme.max_length))
    seconds: Numbers = tokens * (times.a * (width if whole_rows else tokens) + times.b + times.c / width)
    return seconds


def least_done(schemes: Sequence[Scheme], lengths: Sequence[int], *, whole_rows: bool) -> float:
    """Return seconds that no dispatch to pipelines stays below, however they pack; some pipeline holds the longest.

    With weights of pipelines that add up to 1, the last is done no sooner than their weighted mean. So, as in a linear
    programme's dual, every sequence at the pipeline where its weighted seconds are the fewest is a bound; pipelines
    weigh as much as they are fast.
    """
    return _least_done(_problem(schemes, lengths, whole_rows=whole_rows))


def _problem(schemes: Sequence[Scheme], lengths: Sequence[int], *, whole_rows: bool) -> Assigning:
    each = [least_seconds(scheme, lengths, whole_rows=whole_rows) for scheme in schemes]
    return Assigning.of(schemes, each, lengths)


def _least_done(problem: Assigning) -> float:
    speeds = 1 / problem.seconds.sum(axis=1)
    weighted = np.where(problem.may, problem.seconds * (speeds / speeds.sum())[:, None], np.inf)
    alone = np.where(problem.may, problem.seconds * (1 + problem.fill[:, None]), np.inf)
    return max(float(weighted.min(axis=0).sum()), float(alone.min(axis=0).max()))


def dispatch_rows(schemes: Sequence[Scheme], lengths: Sequence[int], seed: int, *, whole_rows: bool) -> Groups:
    """Return the positions of the sequences of each pipeline, longest first; some pipeline holds the longest."""
    falling = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    ordered = [lengths[i] for i in falling]
    problem = _problem(schemes, ordered, whole_rows=whole_rows)
    enough = _least_done(problem) * (1 + _ENOUGH)
    receivers = assign(problem, Effort(_RESTARTS, seed, lambda _: enough, renewed_items=len(lengths)))
    assert receivers is not None  # no pipeline has a limit of all its tokens
    return tuple(tuple(falling[i] for i in np.flatnonzero(receivers == j)) for j in range(len(schemes)))


def pack_whole_rows(scheme: Scheme, lengths: Sequence[int]) -> Groups:
    """Return rows for sequences that the scheme holds, attention being paid for whole rows; each their positions."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    falling, best = [lengths[i] for i in order], NO_ROWS
    counts = range(max(1, -(-sum(falling) // scheme.max_length)), len(falling) + 1)
    for bound, count in sorted((_least_of(scheme, falling, count), count) for count in counts):
        if bound >= best.seconds * (1 - _SLACK):
            break
        _, row_of = _longest_first(falling, falling, count, scheme.max_length)
        if row_of:
            widths = [sum(row) for row in group_by_row(falling, row_of)]
            found = RowAssignment(_seconds(scheme, widths), tuple(row_of))
            best = min(best, found, key=lambda rows: rows.seconds)
    return group_by_row(order, best.row_of)


def _seconds(scheme: Scheme, widths: Sequence[float]) -> float:
    """Return what a pipeline takes for rows of these tokens."""
    return scheme.done([scheme.times.micro_batch_seconds([width]) for width in widths])


def _least_of(scheme: Scheme, falling: Sequence[int], count: int) -> float:
    """Return what so many rows take at least."""
    left = sum(falling)
    alone = 0
    while alone < count - 1 and falling[alone] * (count - alone) > left:
        left -= falling[alone]
        alone += 1
    return _seconds(scheme, [*falling[:alone], *[left / (count - alone)] * (count - alone)])
