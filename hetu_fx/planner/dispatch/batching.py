"""A batch of sequences assigned to the variant that is done with it first, in one of several ways.

The ways are those of `Batching`: Hydraulis' own, and what it is compared with (the batching modes of its artifact).
Rows are tried at several lengths, from that of the longest sequence up to what a pipeline holds: long ones are fewer,
but attention in them costs more. Hydraulis' own way gives each row its own width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from hetu_fx.batches.packing import rows_by_room
from hetu_fx.errors import BatchError
from hetu_fx.planner.dispatch.assignment import (
    ANY_LENGTH,
    Assignment,
    Batching,
    EligibleVariant,
    PackedMicroBatch,
    Request,
    Rows,
    pipeline_seconds,
)
from hetu_fx.planner.dispatch.dispatch import Dispatch, dispatch
from hetu_fx.planner.dispatch.strategy import Scheme, SequenceBatch, Strategy, check_each_once, order_of
from hetu_fx.planner.dispatch.whole_rows import dispatched, least_done, rows_of
from hetu_fx.plans.plan import pipeline_rows


def assign(candidates: Sequence[EligibleVariant], request: Request) -> Assignment:
    """Return the assignment that is expected to be done first, of all candidates that take the longest sequence.

    Raises:
        BatchError: none of them takes it.
    """
    _check_taken(candidates, request)
    found: list[Assignment] = []
    best = math.inf
    for least, candidate in sorted(((_least(one, request), one) for one in candidates), key=lambda pair: pair[0]):
        found += _assignments(candidate, request) if least < best else ()
        best = min((one.seconds for one in found), default=math.inf)
    if not found:
        names = [candidate.name for candidate in candidates]
        raise BatchError(
            f"none of the variants {names} runs rows of {request.longest} tokens on all pipelines with a share, as "
            f"{request.batching.value!r} batching asks; use {Batching.PACKED.value!r}, or pipelines that hold them"
        )
    first = min(found, key=lambda assignment: assignment.seconds)
    check_each_once("an assignment", [first.positions], len(request.lengths))
    return first


def _least(candidate: EligibleVariant, request: Request) -> float:
    """Return seconds that no assignment to a candidate stays below, where rows have their own widths; otherwise 0."""
    if request.batching is not Batching.PACKED or candidate.max_length < request.longest:
        return 0.0
    limited = candidate.with_rows_of(_most(candidate, request))
    return least_done(limited.schemes, request.lengths) + candidate.step_seconds


def _check_taken(candidates: Sequence[EligibleVariant], request: Request) -> None:
    limits = {candidate.name: candidate.max_length for candidate in candidates}
    if max(limits.values(), default=0) < request.longest:
        raise BatchError(
            f"no variant takes a sequence of {request.longest} tokens (most that a pipeline takes, by variant: "
            f"{limits}); cut it, or add a variant whose max_length allows for it"
        )


def _assignments(candidate: EligibleVariant, request: Request) -> Iterator[Assignment]:
    """Yield assignments to a candidate, with rows of several lengths; none if it does not take the batch."""
    for tokens in _row_lengths(request, _most(candidate, request)):
        limited = candidate.with_rows_of(tokens)
        pipelines = _WAYS[request.batching](limited, request)
        if pipelines is None:
            return
        yield Assignment(candidate.name, pipelines, _seconds(limited, pipelines))


def _most(candidate: EligibleVariant, request: Request) -> int:
    """Return the tokens that a row may have."""
    unlimited = candidate.max_length == ANY_LENGTH
    return max(request.longest, request.tokens or 0) if unlimited else candidate.max_length


def _row_lengths(request: Request, most: int) -> Iterator[int]:
    """Yield the lengths of rows that are tried, the longest alone where every row has its own width."""
    if request.longest > most:
        return
    tokens = most if request.batching is Batching.PACKED else request.longest
    while tokens < most and tokens < sum(request.lengths):
        yield tokens
        tokens = max(tokens + 1, min(2 * tokens, most))
    yield tokens


Pipelines = tuple[tuple[PackedMicroBatch, ...], ...]


def _seconds(candidate: EligibleVariant, pipelines: Pipelines) -> float:
    pairs = zip(candidate.schemes, pipelines, strict=True)
    return float(max(pipeline_seconds(scheme, micros) for scheme, micros in pairs) + candidate.step_seconds)


def _shared_out(candidate: EligibleVariant, rows: Rows, width: int) -> Pipelines | None:
    """Share rows of one width out by the plan's shares; None where a pipeline with a share does not hold them."""
    counts = pipeline_rows(len(rows), candidate.plan)
    if any(count and scheme.max_length < width for count, scheme in zip(counts, candidate.schemes, strict=True)):
        return None
    left = iter(rows)
    return tuple(tuple(PackedMicroBatch((next(left),), width) for _ in range(count)) for count in counts)


def _padded(candidate: EligibleVariant, request: Request) -> Pipelines | None:
    return _shared_out(candidate, tuple((i,) for i in range(len(request.lengths))), request.longest)


def _in_order(candidate: EligibleVariant, request: Request) -> Pipelines | None:
    rows: list[list[int]] = []
    room = 0
    for position, length in enumerate(request.lengths):
        if length > room:
            rows.append([])
            room = candidate.max_length
        rows[-1].append(position)
        room -= length
    return _shared_out(candidate, tuple(map(tuple, rows)), candidate.max_length)


def _greedy(candidate: EligibleVariant, request: Request) -> Pipelines | None:
    return _shared_out(candidate, rows_by_room(request.lengths, candidate.max_length), candidate.max_length)


def _dispatched(candidate: EligibleVariant, request: Request) -> Pipelines:
    def rows(scheme: Scheme, positions: Sequence[int]) -> Rows:
        packed_rows = rows_by_room([request.lengths[i] for i in positions], scheme.max_length)
        return tuple(tuple(positions[i] for i in row) for row in packed_rows)

    found = _dispatch(candidate, request.lengths, request)
    return _in_plan_order(candidate, found, lambda j: _own_rows(rows(*_pipeline(found, j)), request))


def _packed(candidate: EligibleVariant, request: Request) -> Pipelines:
    def rows(scheme: Scheme, positions: Sequence[int]) -> Rows:
        found = rows_of(scheme, [request.lengths[i] for i in positions])
        return tuple(tuple(positions[i] for i in row) for row in found)

    groups = dispatched(candidate.schemes, request.lengths, request.seed)
    pairs = zip(candidate.schemes, groups, strict=True)
    return tuple(_own_rows(rows(scheme, group), request) for scheme, group in pairs)


def _alike(candidate: EligibleVariant, request: Request) -> Pipelines:
    widths = tuple(map(request.width, request.lengths))
    found = _dispatch(candidate, widths, request)
    return _in_plan_order(candidate, found, lambda j: _of_one_width(*_pipeline(found, j), widths))


_WAYS: Mapping[Batching, Callable[[EligibleVariant, Request], Pipelines | None]] = {
    Batching.PADDED: _padded,
    Batching.IN_ORDER: _in_order,
    Batching.GREEDY: _greedy,
    Batching.DISPATCHED: _dispatched,
    Batching.PACKED: _packed,
    Batching.ALIKE: _alike,
}


def _dispatch(candidate: EligibleVariant, lengths: tuple[int, ...], request: Request) -> Dispatch:
    return dispatch(Strategy(candidate.schemes), SequenceBatch(lengths), seed=request.seed)


def _pipeline(dispatched: Dispatch, index: int) -> tuple[Scheme, tuple[int, ...]]:
    return dispatched.strategy.pipelines[index], dispatched.pipelines[index]


def _in_plan_order(
    candidate: EligibleVariant, dispatched: Dispatch, micro_batches: Callable[[int], tuple[PackedMicroBatch, ...]]
) -> Pipelines:
    """Return the micro-batches of the plan's pipelines, given those of the strategy's, which are sorted."""
    order = sorted(range(len(candidate.schemes)), key=lambda i: order_of(candidate.schemes[i]))
    by_pipeline = {index: micro_batches(j) for j, index in enumerate(order)}
    return tuple(by_pipeline[index] for index in range(len(order)))


def _own_rows(rows: Rows, request: Request) -> tuple[PackedMicroBatch, ...]:
    """Return a micro-batch for each row, the longest first."""
    made = [PackedMicroBatch((row,), request.width(sum(request.lengths[i] for i in row))) for row in rows]
    return tuple(sorted(made, key=lambda micro: -micro.width))


def _of_one_width(scheme: Scheme, positions: Sequence[int], widths: Sequence[int]) -> tuple[PackedMicroBatch, ...]:
    """Return micro-batches of rows of one width each, as many as the pipeline holds."""
    made: list[PackedMicroBatch] = []
    for width in sorted({widths[i] for i in positions}, reverse=True):
        rows = [(i,) for i in positions if widths[i] == width]
        most = max(1, scheme.max_length // width)
        made += [PackedMicroBatch(tuple(rows[start : start + most]), width) for start in range(0, len(rows), most)]
    return tuple(made)
