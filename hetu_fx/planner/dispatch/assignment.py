"""A batch of sequences as micro-batches of the pipelines of a variant, and what may be asked of one.

Seconds are those of Hydraulis' cost model with attention paid for whole rows: a row of w tokens takes

    a w^2 + b w                                                               (1)

for the devices' kernels work on all pairs of tokens of a row and drop those of different sequences. A pipeline of p
stages takes sum_j T_j + (p - 1) max_j T_j for its micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.strategy import Scheme
from hetu_fx.plans.plan import Plan

Rows = tuple[tuple[int, ...], ...]

ANY_LENGTH = 1 << 40
"""The `max_length` of a scheme of which nobody said what it holds."""


class Batching(StrEnum):
    """How a batch becomes micro-batches.

    PADDED: every sequence is a row as long as the batch's longest; rows are shared out by the plan's shares.
    IN_ORDER: rows of one length hold sequences as they come; shared out by shares.
    GREEDY: as IN_ORDER, but each sequence goes where the least room is left, longest first.
    DISPATCHED: sequences are dispatched to pipelines by time, and packed there as in GREEDY, in rows as long as needed.
    PACKED: dispatched and packed by time, as Hydraulis does, in rows of their own widths.
    ALIKE: dispatched by time; a micro-batch has sequences of one length, rounded up, a row each. For models that
        cannot keep the sequences of a row apart.
    """

    PADDED = "padded"
    IN_ORDER = "in order"
    GREEDY = "greedy"
    DISPATCHED = "dispatched"
    PACKED = "packed"
    ALIKE = "alike"


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """Rows of one width, each the positions in the batch of the sequences that it holds."""

    rows: Rows
    width: int


@dataclass(frozen=True, slots=True)
class EligibleVariant:
    """A variant that may run a batch: its plan, the scheme of each of its pipelines, and what a step takes besides.

    A scheme's `max_length` is what a micro-batch may have, in tokens.
    """

    name: str
    plan: Plan
    schemes: tuple[Scheme, ...]
    step_seconds: float = 0.0

    @property
    def max_length(self) -> int:
        """Return the longest sequence that some pipeline takes."""
        return max(scheme.max_length for scheme in self.schemes)

    def with_rows_of(self, tokens: int) -> EligibleVariant:
        """Return the candidate with micro-batches of at most so many tokens."""
        return replace(self, schemes=tuple(replace(s, max_length=min(s.max_length, tokens)) for s in self.schemes))


@dataclass(frozen=True, slots=True)
class Assignment:
    """What each pipeline of a variant runs, heaviest micro-batch first, and how long that is expected to take."""

    variant: str
    pipelines: tuple[tuple[PackedMicroBatch, ...], ...]
    seconds: float

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the positions of all sequences, in the order in which they are placed."""
        return tuple(i for micro in self.micro_batches for row in micro.rows for i in row)

    @property
    def micro_batches(self) -> tuple[PackedMicroBatch, ...]:
        """Return the micro-batches of all pipelines, one pipeline after another."""
        return tuple(micro for pipeline in self.pipelines for micro in pipeline)


@dataclass(frozen=True, slots=True)
class Request:
    """A batch to be assigned.

    Attributes:
        lengths: tokens of its sequences.
        batching: how it becomes micro-batches.
        multiple: rows have a multiple of so many tokens.
        tokens: of a micro-batch at most, on a pipeline that holds `ANY_LENGTH`; None: as of the longest sequence.
        seed: of the searches.
    """

    lengths: tuple[int, ...]
    batching: Batching = Batching.PACKED
    multiple: int = 1
    tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise PlanError(f"rows cannot have a multiple of {self.multiple} tokens; give 1 or more")

    def width(self, tokens: int) -> int:
        """Return the width of a row for so many tokens."""
        return tokens + -tokens % self.multiple

    @property
    def longest(self) -> int:
        """Return the width that the longest sequence needs."""
        return self.width(max(self.lengths))


def pipeline_seconds(scheme: Scheme, micro_batches: Sequence[PackedMicroBatch]) -> float:
    """Return what a pipeline takes for its micro-batches."""
    times = [len(micro.rows) * scheme.times.seconds(micro.width) + scheme.times.c for micro in micro_batches]
    return math.fsum(times) + (scheme.stages - 1) * max(times, default=0.0)
