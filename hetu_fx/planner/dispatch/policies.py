"""Who runs a batch of sequences: Hydraulis' one variant for all of it, or HotSPa's one for each group of lengths.

A batch, or a group, is assigned to the variant that is done with it first, in one of the ways of `Batching`: Hydraulis'
own, and what it is compared with (the batching modes of its artifact). Where rows have one length, several are tried,
from that of the longest sequence up to what a pipeline holds. Hydraulis' own way gives each row its own width. As its
planner could, it packs for no variant whose bound on any dispatch is later than what another one needs.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hetu_fx.batches.packing import rows_by_room
from hetu_fx.errors import BatchError, PlanError
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
from hetu_fx.planner.dispatch.dispatch import dispatch
from hetu_fx.planner.dispatch.pack import packings
from hetu_fx.planner.dispatch.row_dispatch import dispatch_rows, least_done, pack_whole_rows
from hetu_fx.planner.dispatch.scheme_costs import Scheme, SequenceBatch, Strategy, check_each_once, strategy_order
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
            f"{request.batching.value!r} batching asks\n"
            f"hint: use {Batching.PACKED.value!r}, or pipelines that hold them"
        )
    first = min(found, key=lambda assignment: assignment.seconds)
    check_each_once("an assignment", [first.positions], len(request.lengths))
    return first


def _least(candidate: EligibleVariant, request: Request) -> float:
    """Return seconds that no assignment to a candidate stays below, where rows have their own widths; otherwise 0."""
    if request.batching not in _OF_OWN_WIDTHS or candidate.max_length < request.longest:
        return 0.0
    limited = candidate.with_rows_of(_most(candidate, request))
    return least_done(limited.schemes, request.lengths, whole_rows=request.whole_rows) + candidate.step_seconds


def _check_taken(candidates: Sequence[EligibleVariant], request: Request) -> None:
    limits = {candidate.name: candidate.max_length for candidate in candidates}
    if max(limits.values(), default=0) < request.longest:
        raise BatchError(
            f"no variant takes a sequence of {request.longest} tokens (most that a pipeline takes, by variant: "
            f"{limits})\nhint: cut it, or add a variant whose max_length allows for it"
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
    tokens = most if request.batching in _OF_OWN_WIDTHS else request.longest
    while tokens < most and tokens < sum(request.lengths):
        yield tokens
        tokens = max(tokens + 1, min(2 * tokens, most))
    yield tokens


_OF_OWN_WIDTHS = (Batching.PACKED, Batching.WHOLE_ROWS)

Pipelines = tuple[tuple[PackedMicroBatch, ...], ...]


def _seconds(candidate: EligibleVariant, pipelines: Pipelines) -> float:
    pairs = zip(candidate.schemes, pipelines, strict=True)
    return float(max(pipeline_seconds(scheme, micros) for scheme, micros in pairs) + candidate.step_seconds)


def _shared_out(candidate: EligibleVariant, request: Request, rows: Rows, width: int) -> Pipelines | None:
    """Share rows of one width out by the plan's shares; None where a pipeline with a share does not hold them."""
    counts = pipeline_rows(len(rows), candidate.plan)
    if any(count and scheme.max_length < width for count, scheme in zip(counts, candidate.schemes, strict=True)):
        return None
    left = iter(rows)
    return tuple(tuple(request.micro_batch((next(left),), width) for _ in range(count)) for count in counts)


def _padded(candidate: EligibleVariant, request: Request) -> Pipelines | None:
    return _shared_out(candidate, request, tuple((i,) for i in range(len(request.lengths))), request.longest)


def _in_order(candidate: EligibleVariant, request: Request) -> Pipelines | None:
    rows: list[list[int]] = []
    room = 0
    for position, length in enumerate(request.lengths):
        if length > room:
            rows.append([])
            room = candidate.max_length
        rows[-1].append(position)
        room -= length
    return _shared_out(candidate, request, tuple(map(tuple, rows)), candidate.max_length)


def _greedy(candidate: EligibleVariant, request: Request) -> Pipelines | None:
    rows = rows_by_room(request.lengths, candidate.max_length)
    return _shared_out(candidate, request, rows, candidate.max_length)


def _dispatched(candidate: EligibleVariant, request: Request) -> Pipelines:
    pairs = zip(candidate.schemes, _groups(candidate, request.lengths, request), strict=True)
    by_room = ((rows_by_room([request.lengths[i] for i in own], scheme.max_length), own) for scheme, own in pairs)
    return tuple(_own_rows(rows, own, request) for rows, own in by_room)


def _packed(candidate: EligibleVariant, request: Request) -> Pipelines:
    if request.whole_rows:
        return _in_whole_rows(candidate, request)
    groups = dispatch_rows(candidate.schemes, request.lengths, request.seed, whole_rows=False)
    lengths = ([request.lengths[i] for i in own] for own in groups)
    done = packings(list(zip(candidate.schemes, lengths, strict=True)), seed=request.seed)
    return tuple(_own_rows(one.rows, own, request) for one, own in zip(done, groups, strict=True))


def _in_whole_rows(candidate: EligibleVariant, request: Request) -> Pipelines:
    groups = dispatch_rows(candidate.schemes, request.lengths, request.seed, whole_rows=True)
    pairs = zip(candidate.schemes, groups, strict=True)
    by_time = ((pack_whole_rows(scheme, [request.lengths[i] for i in own]), own) for scheme, own in pairs)
    return tuple(_own_rows(rows, own, request) for rows, own in by_time)


def _alike(candidate: EligibleVariant, request: Request) -> Pipelines:
    widths = tuple(map(request.width, request.lengths))
    pairs = zip(candidate.schemes, _groups(candidate, widths, request), strict=True)
    return tuple(_of_one_width(scheme, own, widths, request) for scheme, own in pairs)


_WAYS: Mapping[Batching, Callable[[EligibleVariant, Request], Pipelines | None]] = {
    Batching.PADDED: _padded,
    Batching.IN_ORDER: _in_order,
    Batching.GREEDY: _greedy,
    Batching.DISPATCHED: _dispatched,
    Batching.PACKED: _packed,
    Batching.WHOLE_ROWS: _in_whole_rows,
    Batching.ALIKE: _alike,
}


def _groups(candidate: EligibleVariant, lengths: tuple[int, ...], request: Request) -> list[tuple[int, ...]]:
    """Return the positions of the sequences of each of the plan's pipelines, which a strategy has in another order."""
    found = dispatch(Strategy(candidate.schemes), SequenceBatch(lengths), seed=request.seed)
    order = sorted(range(len(candidate.schemes)), key=lambda i: strategy_order(candidate.schemes[i]))
    return [group for _, group in sorted(zip(order, found.pipelines, strict=True))]


def _own_rows(rows: Rows, positions: Sequence[int], request: Request) -> tuple[PackedMicroBatch, ...]:
    """Return a micro-batch for each row of some sequences, the longest first."""
    placed = [tuple(positions[i] for i in row) for row in rows]
    made = [request.micro_batch((row,), request.width(sum(request.lengths[i] for i in row))) for row in placed]
    return tuple(sorted(made, key=lambda micro: -micro.width))


def _of_one_width(
    scheme: Scheme, positions: Sequence[int], widths: Sequence[int], request: Request
) -> tuple[PackedMicroBatch, ...]:
    """Return micro-batches of rows of one width each, as many as the pipeline holds."""
    made: list[PackedMicroBatch] = []
    for width in sorted({widths[i] for i in positions}, reverse=True):
        rows = [(i,) for i in positions if widths[i] == width]
        most = max(1, scheme.max_length // width)
        made += [request.micro_batch(tuple(rows[start : start + most]), width) for start in range(0, len(rows), most)]
    return tuple(made)


class SequencePolicy(Protocol):
    """Chooses what runs a batch of sequences: a pure function, so that all ranks choose alike; hashable."""

    def __call__(self, candidates: Sequence[EligibleVariant], request: Request, /) -> tuple[Assignment, ...]:
        """Return the parts of the batch in the order in which they run, no variant twice."""
        ...


@dataclass(frozen=True, slots=True)
class Hydraulis:
    """The whole batch on the variant that is expected to do it first.

    `batching` says how it becomes micro-batches; the other ways than Hydraulis' own are what it is compared with.
    """

    batching: Batching = Batching.PACKED

    def __call__(self, candidates: Sequence[EligibleVariant], request: Request, /) -> tuple[Assignment, ...]:
        """Return one assignment of the whole batch."""
        return (assign(candidates, _batched(request, self.batching)),)


@dataclass(frozen=True, slots=True)
class HotSPa:
    """Groups of lengths one after another, shortest first, each on the variant that does it first.

    As HotSPa does inside a step (SOSP 2024): a sequence belongs to the group of the least bound that it does not
    exceed; inside a group rows are packed greedily. Gradients of the groups add up. Left is HotSPa where it drops rows
    that do not fill all replicas. Groups that choose the same variant run as one part. `variants` says which variant
    each group runs on, one more than there are `bounds` (in tokens); left out, the one that is expected to do it first.
    `batching` says how a group becomes micro-batches.
    """

    bounds: tuple[int, ...]
    variants: tuple[str, ...] = ()
    batching: Batching = Batching.GREEDY

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(sorted(self.bounds)))
        object.__setattr__(self, "variants", tuple(self.variants))
        if self.variants and len(self.variants) != len(self.bounds) + 1:
            raise PlanError(
                f"bounds {self.bounds} make {len(self.bounds) + 1} groups, but there are variants {self.variants}\n"
                f"hint: give one for each group, shortest first"
            )
        if any(bound < 1 for bound in self.bounds) or len(set(self.bounds)) < len(self.bounds):
            raise PlanError(
                f"groups of lengths have bounds {self.bounds}\nhint: give different numbers of tokens from 1"
            )

    def __call__(self, candidates: Sequence[EligibleVariant], request: Request, /) -> tuple[Assignment, ...]:
        """Return an assignment for each variant that has a group."""
        parts: dict[str, Assignment] = {}
        for number, group in self.groups(request.lengths):
            lengths = tuple(request.lengths[i] for i in group)
            own = [one for one in candidates if not self.variants or one.name == self.variants[number]]
            found = _at(assign(own, replace(_batched(request, self.batching), lengths=lengths)), group)
            known = parts.get(found.variant)
            parts[found.variant] = found if known is None else _joined(known, found)
        return tuple(parts.values())

    def groups(self, lengths: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Return the number and the positions of each group that has sequences, shortest first; the last is open."""
        of = [bisect.bisect_left(self.bounds, length) for length in lengths]
        return [(number, tuple(i for i, group in enumerate(of) if group == number)) for number in sorted(set(of))]


@dataclass(frozen=True, slots=True)
class EarliestFinish:
    """What that of several `policies` says that is expected to be done first, the first one of equals.

    `Hydraulis` needs a variant that takes the longest sequence for the whole batch; where that is all devices together,
    `HotSPa` leaves the short ones to others, but gathers parameters and reduces gradients once more.
    """

    policies: tuple[SequencePolicy, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "policies", tuple(self.policies))
        if not self.policies:
            raise PlanError("there is no policy to follow\nhint: give one or more")

    def __call__(self, candidates: Sequence[EligibleVariant], request: Request, /) -> tuple[Assignment, ...]:
        """Return the parts that take the fewest seconds together."""
        answers = [policy(candidates, request) for policy in self.policies]
        return min(answers, key=lambda parts: math.fsum(part.seconds for part in parts))


def _batched(request: Request, batching: Batching) -> Request:
    """Return the request with its batching, unless the model leaves no choice."""
    return request if request.batching is Batching.ALIKE else replace(request, batching=batching)


def _at(assignment: Assignment, positions: Sequence[int]) -> Assignment:
    """Return the assignment of a group with positions in the whole batch."""

    def moved(micro: PackedMicroBatch) -> PackedMicroBatch:
        return replace(micro, rows=tuple(tuple(positions[i] for i in row) for row in micro.rows))

    return replace(assignment, pipelines=tuple(tuple(map(moved, micros)) for micros in assignment.pipelines))


def _joined(one: Assignment, other: Assignment) -> Assignment:
    """Return two assignments to a variant as one, wide micro-batches first."""
    pairs = zip(one.pipelines, other.pipelines, strict=True)
    pipelines = tuple(tuple(sorted(a + b, key=lambda micro: -micro.width)) for a, b in pairs)
    return Assignment(one.variant, pipelines, one.seconds + other.seconds)
