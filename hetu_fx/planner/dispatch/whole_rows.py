"""Sequences to pipelines and into rows where attention is paid for whole rows, in a few milliseconds.

A row of w tokens takes T(w) = a w^2 + b w + c: for a token the least at w = sqrt(c / a), as shorter rows are more
micro-batches and longer ones more pairs of tokens. So a sequence of s tokens adds, whatever row it is in, at least

    t(s) = s (a w + b + c / w),  w = sqrt(c / a), but s at least and what a row holds at most             (1)

Sequences are dispatched by (1) in place of the cost model's seconds of a sequence, and those of a pipeline are put
into v rows, longest first, each where the fewest tokens are. v is tried in the order of what v rows take at least:
the longest sequences have a row each while they are longer than the mean of the others, which share theirs equally.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from hetu_fx.planner.dispatch.local_search import Assigning
from hetu_fx.planner.dispatch.makespan import Effort, assign
from hetu_fx.planner.dispatch.strategy import Numbers, Scheme

Groups = tuple[tuple[int, ...], ...]

_RESTARTS = 2
_ENOUGH = 0.005  # a dispatch that misses its bound by this share is good enough: rows are not all of the best width
_SLACK = 1e-3  # a number of rows that cannot be better by this share is not tried


def least_seconds(scheme: Scheme, lengths: Sequence[int]) -> Numbers:
    """Return (1) for sequences of these lengths, shape (sequences,); what a longer one than a row holds adds too."""
    times, tokens = scheme.times, np.array(lengths, dtype=np.float64)
    best = math.sqrt(times.c / times.a) if times.a else math.inf
    width = np.maximum(tokens, min(best, scheme.max_length))
    seconds: Numbers = tokens * (times.a * width + times.b + times.c / width)
    return seconds


def least_done(schemes: Sequence[Scheme], lengths: Sequence[int]) -> float:
    """Return seconds that no dispatch to pipelines stays below, however they pack; some pipeline holds the longest.

    With weights of pipelines that add up to 1, the last is done no sooner than their weighted mean. So, as in a linear
    programme's dual, every sequence at the pipeline where its weighted seconds are the fewest is a bound; pipelines
    weigh as much as they are fast.
    """
    return _least_done(_problem(schemes, lengths))


def _least_done(problem: Assigning) -> float:
    speeds = 1 / problem.seconds.sum(axis=1)
    weighted = np.where(problem.may, problem.seconds * (speeds / speeds.sum())[:, None], np.inf)
    alone = np.where(problem.may, problem.seconds * (1 + problem.fill[:, None]), np.inf)
    return max(float(weighted.min(axis=0).sum()), float(alone.min(axis=0).max()))


def dispatched(schemes: Sequence[Scheme], lengths: Sequence[int], seed: int) -> Groups:
    """Return the positions of the sequences of each pipeline, longest first; some pipeline holds the longest."""
    falling = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    problem = _problem(schemes, [lengths[i] for i in falling])
    enough = _least_done(problem) * (1 + _ENOUGH)
    receivers = assign(problem, Effort(_RESTARTS, seed, lambda _: enough, renewed_items=len(lengths)))
    assert receivers is not None  # no pipeline has a limit of all its tokens
    return tuple(tuple(falling[i] for i in np.flatnonzero(receivers == j)) for j in range(len(schemes)))


def _problem(schemes: Sequence[Scheme], lengths: Sequence[int]) -> Assigning:
    tokens = np.array(lengths, dtype=np.float64)
    return Assigning(
        seconds=np.stack([least_seconds(scheme, lengths) for scheme in schemes]),
        may=tokens <= np.array([[scheme.max_length] for scheme in schemes]),
        fill=np.array([scheme.stages - 1.0 for scheme in schemes]),
        room=np.full(len(schemes), np.inf),
        tokens=tokens,
    )


def rows_of(scheme: Scheme, lengths: Sequence[int]) -> Groups:
    """Return rows for sequences that the scheme holds, each the positions of its sequences."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    falling = [lengths[i] for i in order]
    counts = range(max(1, -(-sum(falling) // scheme.max_length)), len(falling) + 1)
    best, least = math.inf, tuple[tuple[int, ...], ...]()
    for bound, count in sorted((_least_of(scheme, falling, count), count) for count in counts):
        if bound >= best * (1 - _SLACK):
            break
        rows = _longest_first(falling, count, scheme.max_length)
        seconds = _seconds(scheme, [sum(falling[i] for i in row) for row in rows]) if rows else math.inf
        if seconds < best:
            best, least = seconds, rows
    return tuple(tuple(order[i] for i in row) for row in least)


def _seconds(scheme: Scheme, widths: Sequence[float]) -> float:
    """Return what a pipeline takes for rows of these tokens."""
    times = [scheme.times.seconds(width) + scheme.times.c for width in widths]
    return math.fsum(times) + (scheme.stages - 1) * max(times)


def _least_of(scheme: Scheme, falling: Sequence[int], count: int) -> float:
    """Return what so many rows take at least."""
    left = sum(falling)
    alone = 0
    while alone < count - 1 and falling[alone] * (count - alone) > left:
        left -= falling[alone]
        alone += 1
    return _seconds(scheme, [*falling[:alone], *[left / (count - alone)] * (count - alone)])


def _longest_first(falling: Sequence[int], count: int, room: int) -> Groups:
    """Return so many rows, each sequence in the one with the fewest tokens; none where one does not fit there."""
    rows: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, row) for row in range(count)]
    for i, length in enumerate(falling):
        tokens, row = heappop(heap)
        if tokens + length > room:
            return ()
        heappush(heap, (tokens + length, row))
        rows[row].append(i)
    return tuple(map(tuple, rows))
