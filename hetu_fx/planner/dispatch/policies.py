"""Who runs a batch of sequences: Hydraulis' one variant for all of it, or HotSPa's one for each group of lengths."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.assignment import Assignment, Batching, EligibleVariant, PackedMicroBatch, Request
from hetu_fx.planner.dispatch.batching import assign


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
    each group runs on, one more than there are bounds; left out, the one that is expected to do it first.
    """

    bounds: tuple[int, ...]
    variants: tuple[str, ...] = ()
    batching: Batching = Batching.GREEDY

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(sorted(self.bounds)))
        object.__setattr__(self, "variants", tuple(self.variants))
        if self.variants and len(self.variants) != len(self.bounds) + 1:
            raise PlanError(
                f"bounds {self.bounds} make {len(self.bounds) + 1} groups, but there are variants {self.variants}; "
                f"give one for each group, shortest first"
            )
        if any(bound < 1 for bound in self.bounds) or len(set(self.bounds)) < len(self.bounds):
            raise PlanError(f"groups of lengths have bounds {self.bounds}; give different numbers of tokens from 1")

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
class Soonest:
    """What the policy says that is expected to be done first, the first one of equals.

    `Hydraulis` needs a variant that takes the longest sequence for the whole batch; where that is all devices together,
    `HotSPa` leaves the short ones to others, but gathers parameters and reduces gradients once more.
    """

    policies: tuple[SequencePolicy, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "policies", tuple(self.policies))
        if not self.policies:
            raise PlanError("there is no policy to follow; give one or more")

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
