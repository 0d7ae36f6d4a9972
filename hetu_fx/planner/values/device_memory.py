"""Bytes that a device holds, at the instants of a step that can be its peak.

Lasting, for a device that reads P bytes of parameters and owns H of them at home (all of them where states are not
spread; else its share, by speed, of what the readers of each part own together), with k moments in its optimizer:

    parameters H,  optimizer k H,  copies C: what it reads but does not own, gathered once per step        (1)

k, which a master copy counts with, and the size of gradients beside P are those of `values.state`; P below is theirs.

Passing, with m micro-batches of x rows, f of them in flight, K kept by one (`values.footprint`):

    gather            the messages that bring C, a few buckets at a time                                   (2)
    forward           (f - 1) K + most in a forward; gradients P if a backward has been before             (3)
    first backward    (f - 1) K + most in a backward, with the gradients made up to there                  (4)
    later backward    the same with all gradients P, and one more micro-batch in flight if m > f           (5)
    synchronisation   gradients P, a message of a bucket of them, and what arrives from others for it      (6)
    update            gradients H, and three values for each element of the largest parameter              (7)

(7) is for Adam that goes from parameter to parameter, as torch's does on a CPU; one that works on all at once takes up
to H more. Where gradients go as they come (zero 2, 3), of those that have been made there are in (4) and (6) what
stays at home and a few messages. Where parameters are gathered unit by unit (zero 3), C is the buffers in which units
take turns, those of two that follow each other. 1F1B keeps f = min(m, p - s) micro-batches of m on stage s of p, GPipe
all m, zero bubble min(m, p), of which those whose weights' gradients wait count as others do: they keep less (inputs of
products, and gradients of results). What is sent to other stages is held until something comes back: that of f + 1
micro-batches. What a stage in chunks keeps says `chunk_memory`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from hetu_fx.comm_ops.plans.cost import BUCKET_BYTES, BUCKETS_AT_ONCE
from hetu_fx.planner.values.footprint import StageFootprint
from hetu_fx.planner.values.line import ZERO, Line
from hetu_fx.planner.values.state import UNSAID, ParameterState
from hetu_fx.plans.plan import Schedule

UNBOUNDED = 1 << 40
"""More rows than any batch has."""

MOMENTS = 2
"""Of Adam, where nothing is said of an optimizer."""

UPDATE_VALUES = 3
"""How many values Adam's arithmetic holds for an element that it updates."""

UPDATE_LISTS = 1
"""How many it holds for all elements at once where it works on lists of parameters: roots of the second moments."""

T = TypeVar("T")
Terms = tuple[tuple[str, int], ...]
TERMS = ("parameters", "copies", "optimizer", "gradients", "activations", "messages", "update")


def in_flight(schedule: Schedule, stage: int, num_stages: int, micro_batches: int) -> int:
    """Return how many micro-batches a stage keeps activations of, f in (3)."""
    most = {"gpipe": micro_batches, "zero-bubble": num_stages}
    return min(micro_batches, most.get(schedule, num_stages - stage))


def fixed_bytes(parameters: float, *, zero: int, num_replicas: int, state: ParameterState = UNSAID) -> Terms:
    """Return what a device that reads so many bytes of parameters holds of them and their states, outside an update.

    In all it is what `instants` counts for states spread evenly over the replicas: P of parameters, P of gradients and
    (1 + k) P / n of home parameters and states; without replicas, or zero 0, the parameters are those at home.
    """
    return tuple((term, math.ceil(count)) for term, count in fixed_terms(parameters, zero, num_replicas, state))


def fixed_terms(parameters: T, zero: int, num_replicas: int, state: ParameterState) -> tuple[tuple[str, T], ...]:
    """Return the same before it is rounded, for a number or many at once."""
    kept, given = state.optimizer_share, cast(Any, parameters)
    optimizer = (1 + kept) * given / num_replicas if zero and num_replicas > 1 else kept * given
    return ("parameters", given), ("gradients", state.gradient_share * given), ("optimizer", optimizer)


@dataclass(frozen=True, slots=True)
class GoingGradients:
    """What gradients hold that go home as they come, a few buckets of them at once.

    Attributes:
        kept: the share of them that is at home on the device.
        arriving: the bytes that arrive from others for each byte that is sent.
        bucket: bytes of a bucket.
        largest: bytes of the largest one.
        at_once: the most that are under way.
    """

    kept: float
    arriving: float
    bucket: float
    largest: float
    at_once: int

    def _under_way(self, made: float) -> float:
        return min(made, self.largest + (self.at_once - 1) * self.bucket)

    def messages(self, made: float) -> float:
        """Return what gradients of so many bytes hold beside what stays at home, while the last buckets arrive."""
        return (1 - self.kept) * self._under_way(made) + (self.kept + self.arriving) * min(made, self.largest)

    def __call__(self, made: float) -> float:
        """Return what gradients of so many bytes hold before the last few of them have arrived."""
        return self.kept * made + (1 - self.kept) * self._under_way(made)


@dataclass(frozen=True, slots=True)
class HeldShard:
    """What a device of a stage holds for any number of rows and micro-batches.

    Attributes:
        parameters: bytes as its graph reads them, P.
        owned: bytes of its home parameters, H.
        copied: bytes of what it reads but is not its own memory at home, C.
        synced: bytes of parameters whose gradients travel to their homes.
        footprint: of its stage's parts.
        handed: bytes per row that it sends to neighbours, activations and gradients of them.
        state: what stands beside parameters.
        lets_go: whether gradients go home as they come.
        unit: bytes of the largest unit of parameters, where these are gathered unit by unit: C is the bytes of the
            buffers then. 0: they are there for the whole step.
    """

    parameters: float
    owned: float
    copied: float
    synced: float
    footprint: StageFootprint
    handed: float = 0.0
    state: ParameterState = UNSAID
    lets_go: bool = False
    unit: float = 0.0

    @property
    def optimizer(self) -> float:
        """Return the bytes of what its optimizer keeps."""
        return self.state.optimizer_share * self.owned

    @property
    def lasting(self) -> float:
        """Return the bytes that it holds all the time, (1)."""
        return self.owned + self.optimizer + self.copied

    @property
    def gradients(self) -> float:
        """Return the bytes of all gradients that it makes."""
        return self.state.gradient_share * self.parameters

    @property
    def owned_gradients(self) -> float:
        """Return the bytes of the gradients that it updates by."""
        return self.state.gradient_share * self.owned

    @property
    def left_gradients(self) -> float:
        """Return the bytes of gradients that are there when the last backward is over."""
        return self.owned_gradients if self.lets_go else self.gradients

    @property
    def messages(self) -> float:
        """Return the bytes of messages that bring its gradients home, and of what arrives from others.

        A bucket takes the place of the gradients that are packed into it: only that of the last ones is more.
        """
        whole = self.state.gradient_share * self.synced
        return self.going.messages(whole) if self.lets_go else (1 + self._arriving) * min(whole, self.going.largest)

    @property
    def _arriving(self) -> float:
        """Return the bytes of gradients that arrive from others for each byte that is sent."""
        return max(0.0, self.synced - self.owned) / self.synced if self.copied and self.synced else 0.0

    @property
    def going(self) -> GoingGradients:
        """Return what gradients hold that go as they come."""
        most, largest = self.unit or self.gradients, self.state.gradient_share * self.footprint.largest
        bucket = min(most, BUCKET_BYTES)
        kept = self.owned / self.parameters if self.parameters else 0.0
        at_once = min(BUCKETS_AT_ONCE, math.ceil(self.unit / BUCKET_BYTES) or BUCKETS_AT_ONCE)
        return GoingGradients(kept, self._arriving, bucket, min(most, max(bucket, largest)), at_once)

    @property
    def update_bytes(self) -> float:
        """Return the bytes that the optimizer's arithmetic takes: for one parameter after another, or all at once."""
        share = self.owned / self.parameters if self.parameters else 0.0
        values = UPDATE_VALUES * self.footprint.largest * share
        at_once = UPDATE_LISTS * self.owned if self.state.by_lists else 0.0
        return self.state.update_share * max(values, at_once)


@dataclass(frozen=True, slots=True)
class Instant:
    """What a device holds at once: what lasts of a shard, and beside it bytes by term, activations and messages.

    Activations are a line over a micro-batch's rows, messages are bytes per row.
    """

    name: str
    shard: HeldShard
    terms: Mapping[str, float]
    activations: Line = ZERO
    messages: float = 0.0

    @property
    def line(self) -> Line:
        """Return the bytes of all terms."""
        fixed, per_row = self.activations
        return Line(self.shard.lasting + sum(self.terms.values()) + fixed, per_row + self.messages)

    def at(self, rows: int) -> Terms:
        """Return the bytes by term, in order."""
        shard = self.shard
        lasting = {"parameters": shard.owned, "copies": shard.copied, "optimizer": shard.optimizer}
        growing = {"activations": self.activations(rows), "messages": self.messages * rows}
        held = ((term, lasting.get(term, 0.0) + self.terms.get(term, 0.0) + growing.get(term, 0.0)) for term in TERMS)
        return tuple((term, math.ceil(count)) for term, count in held)


def instants(shard: HeldShard, num_in_flight: int, micro_batches: int) -> Iterator[Instant]:
    """Yield what a device holds at (2) to (7)."""
    yield from at_ends(shard, min(micro_batches, num_in_flight + 1) * shard.handed)
    yield from _passing(shard, num_in_flight, micro_batches)


def at_ends(shard: HeldShard, sent: float) -> Iterator[Instant]:
    """Yield (2), (6) and (7), before micro-batches and after them; `sent` is bytes per row of messages."""
    travelling = min(shard.copied, BUCKETS_AT_ONCE * BUCKET_BYTES)
    synced = {"gradients": shard.left_gradients, "messages": shard.messages}
    yield Instant("gather", shard, {"messages": travelling})
    yield Instant("synchronisation", shard, synced, messages=sent)
    yield Instant("update", shard, {"gradients": shard.owned_gradients, "update": shard.update_bytes})


def _passing(shard: HeldShard, num_in_flight: int, micro_batches: int) -> Iterator[Instant]:
    """Yield (3), (4) and (5)."""
    print_, others = shard.footprint, num_in_flight - 1
    has_gradients = micro_batches > num_in_flight
    sent = min(micro_batches, num_in_flight + 1) * shard.handed
    none: Mapping[str, float] = {}
    gradients = {"gradients": shard.gradients}
    for line in print_.forward:
        yield Instant("forward", shard, gradients if has_gradients else none, line + print_.kept.times(others), sent)
    for line in print_.backward:
        yield Instant("first backward", shard, none, line + print_.kept.times(others), sent)
    if micro_batches > 1:
        left = others if has_gradients else others - 1
        for line in print_.later:
            yield Instant("later backward", shard, gradients, line + print_.kept.times(left), sent)


def peak(found: Iterable[Instant], rows: int) -> Terms:
    """Return the bytes by term at the instant that holds most with micro-batches of `rows` rows."""
    return max(found, key=lambda instant: instant.line(rows)).at(rows)


def most_rows(limit: float, shard: HeldShard, num_in_flight: int, micro_batches: int) -> int:
    """Return the most rows of a micro-batch for which every instant stays within the limit; 0 when none do."""
    return min(_most_rows(limit, instant.line) for instant in instants(shard, num_in_flight, micro_batches))


def _most_rows(limit: float, line: Line) -> int:
    if line.fixed > limit:
        return 0
    return min(UNBOUNDED, int((limit - line.fixed) / line.slope)) if line.slope > 0 else UNBOUNDED
