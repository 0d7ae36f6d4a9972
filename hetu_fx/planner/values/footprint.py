"""What a part of a program holds in memory while a micro-batch goes through it; numbers only.

A part is what stands before the repeated blocks, a block, or what stands after them. A micro-batch that has gone
forward through a part leaves `kept` bytes there until its backward has passed. While it passes, more is held:
`forward` is the most above what the parts before it keep, `backward` and `later` the most above what the part itself
and those before it keep and the gradients of later parts. In `backward` the part makes its parameters' gradients, in
`later` it adds to those of earlier micro-batches. A block that is computed again in backward is told piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import attrgetter

from hetu_fx.errors import PlanError
from hetu_fx.planner.values.line import NOTHING, ZERO, Amount, Line, uppermost, weighted_sum
from hetu_fx.plans.recomputed import RecomputedOps


@dataclass(frozen=True, slots=True)
class Segment:
    """What stands between two messages of a block that is computed again in backward: it comes back by itself.

    `kept` is what is left after the forward, `sent` what is besides since it was sent; `forward`, `backward` and
    `later` are the most above what earlier parts and pieces leave, `backward` with the gradients of the block's later
    pieces. `weights` and `products` are left besides where products with weights, and all other products, are not
    computed again.
    """

    kept: Amount = NOTHING
    sent: Amount = NOTHING
    forward: Amount = NOTHING
    backward: Amount = NOTHING
    later: Amount = NOTHING
    weights: Amount = NOTHING
    products: Amount = NOTHING

    def computing(self, ops: RecomputedOps) -> Segment:
        """Return what it is where only those ops are computed again."""
        match ops:
            case "all":
                return self
            case "attention":
                return replace(self, kept=self.kept + self.weights)
            case "pointwise":
                return replace(self, kept=self.kept + self.weights + self.products)

    def by_sequence(self, received: float) -> Segment:
        """Return what it is for a context parallel group, from which it has received so many bytes per row."""
        kept, sent = self.kept.by_sequence(0.0), self.sent.by_sequence(self.gathered)
        most = (a.by_sequence(received) for a in (self.forward, self.backward, self.later))
        return Segment(kept, sent, *most, *(a.by_sequence(0.0) for a in (self.weights, self.products)))

    @property
    def in_ring(self) -> Segment:
        """Return what it is where what was sent is a part on each device."""
        return replace(self, sent=replace(self.sent, sequence_per_row=self.sent.per_row))

    @property
    def gathered(self) -> float:
        """Return the bytes per row of what was sent that every device of a context parallel group has the whole of."""
        return self.sent.per_row - self.sent.sequence_per_row


Segments = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class RecomputeMemory:
    """The pieces of a block by how the devices of its stage share work; none where they are not known.

    One device alone, tensor parallel ones that share the sequence or do not, context parallel ones, and a grid of both.
    """

    alone: Segments = ()
    tensor: Segments = ()
    sequence: Segments = ()
    context: Segments = ()
    grid: Segments = ()

    def each(self, change: Callable[[Segments], Segments]) -> RecomputeMemory:
        """Return the same with all pieces changed."""
        return self if self == UNKNOWN else RecomputeMemory(*map(change, _WAYS(self)))

    def amounts(self, change: Callable[[Amount], Amount]) -> RecomputeMemory:
        """Return the same with all amounts changed."""
        return self.each(lambda pieces: tuple(Segment(*map(change, _PIECE(piece))) for piece in pieces))

    @property
    def in_sequence(self) -> RecomputeMemory:
        """Return what it is for tensor parallel groups that share the sequence: `tensor` is `sequence` then."""
        shared = self.amounts(lambda amount: amount.in_sequence)
        return replace(shared, tensor=shared.sequence)

    @property
    def by_sequence(self) -> RecomputeMemory:
        """Return what it is for a context parallel group."""
        return self.each(_by_sequence)

    @property
    def in_ring(self) -> RecomputeMemory:
        """Return what it is where nothing is gathered: devices of a context parallel group send each other parts."""
        return self.each(lambda pieces: tuple(piece.in_ring for piece in pieces))

    @classmethod
    def combined(cls, found: Sequence[RecomputeMemory], weights: Sequence[float]) -> RecomputeMemory:
        """Return the weighted sum; nothing where the pieces differ."""
        ways = list(zip(*map(_WAYS, found), strict=True))
        if any(len(set(map(len, pieces))) > 1 for pieces in ways):
            return cls()
        columns = (zip(*pieces, strict=True) for pieces in ways)
        return cls(*(tuple(weighted_sum(Segment, _PIECE, column, weights) for column in pieces) for pieces in columns))


UNKNOWN = RecomputeMemory()

_WAYS = attrgetter(*(field.name for field in fields(RecomputeMemory)))
_PIECE = attrgetter(*(field.name for field in fields(Segment)))


def _by_sequence(pieces: Segments) -> Segments:
    received = (0.0, *(piece.gathered for piece in pieces))
    return tuple(piece.by_sequence(count) for piece, count in zip(pieces, received, strict=False))


@dataclass(frozen=True, slots=True)
class PartMemory:
    """What a part keeps of a micro-batch, and the most that is held while it passes; see the module.

    `largest` is the part's largest parameter, `again` what holds where the part is computed again in backward, and
    `pieces` what it then is.
    """

    kept: Amount = NOTHING
    forward: Amount = NOTHING
    backward: Amount = NOTHING
    later: Amount = NOTHING
    largest: Amount = NOTHING
    again: RecomputeMemory = field(default=UNKNOWN, kw_only=True)
    pieces: Segments = field(default=(), kw_only=True)

    def recomputed(self, way: str, kept: Amount, ops: RecomputedOps) -> PartMemory:
        """Return what it is where it is computed again in backward.

        Args:
            way: how devices share work, as `RecomputeMemory` names it.
            kept: what is left after the forward if `again` does not say; all comes back at once then.
            ops: which are computed again; if `again` does not say, it is as if none were where not all are.
        """
        known: Segments = getattr(self.again, way)
        if known or ops != "all":
            return replace(self, pieces=tuple(piece.computing(ops) for piece in known))
        backward, later = self.backward + self.kept, self.later + self.kept
        assumed = Segment(kept=kept, forward=self.forward, backward=backward, later=later)
        return replace(self, pieces=(assumed,))

    @property
    def in_sequence(self) -> PartMemory:
        """Return what it is for a tensor parallel group that shares the sequence."""
        return replace(self._each(lambda amount: amount.in_sequence), again=self.again.in_sequence)

    @classmethod
    def combined(cls, parts: Sequence[PartMemory], weights: Sequence[float]) -> PartMemory:
        """Return the weighted sum of what parts hold."""
        again = RecomputeMemory.combined([part.again for part in parts], weights)
        return replace(weighted_sum(cls, _AMOUNTS, parts, weights), again=again)

    def narrowed(self, share: float) -> PartMemory:
        """Return what it is for a device that has `share` of what is split."""
        return self._each(lambda amount: amount.narrowed(share))

    def by_sequence(self, gathered: float) -> PartMemory:
        """Return what it is for a context parallel group, which gathers so many bytes per row."""
        return replace(self._each(lambda amount: amount.by_sequence(gathered)), again=self.again.by_sequence)

    @property
    def in_ring(self) -> PartMemory:
        """Return what it is where keys and values go round in parts."""
        return replace(self, again=self.again.in_ring)

    def _each(self, change: Callable[[Amount], Amount]) -> PartMemory:
        return PartMemory(*map(change, _AMOUNTS(self)), again=self.again.amounts(change))

    def lines(self, share: float) -> Iterator[tuple[Line, Line, Line, Line]]:
        """Yield what is kept, and the most forward, backward and later above what was kept before, piece by piece."""
        if not self.pieces:
            kept, forward, backward, later = (amount.line(share) for amount in _HELD(self))
            yield kept, forward, kept + backward, kept + later
        for piece in self.pieces:
            kept, forward, backward, later = (amount.line(share) for amount in _HELD(piece))
            yield kept + piece.sent.line(share), forward, backward, later


_HELD = attrgetter("kept", "forward", "backward", "later")
_AMOUNTS = attrgetter("kept", "forward", "backward", "later", "largest")


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """What each part holds, in order; `everywhere` is kept by every stage: tables and masks that it computes itself."""

    parts: tuple[PartMemory, ...]
    everywhere: Amount = NOTHING

    @property
    def in_sequence(self) -> ProgramMemory:
        """Return what it is for tensor parallel groups that share the sequence."""
        return ProgramMemory(tuple(part.in_sequence for part in self.parts), self.everywhere.in_sequence)

    @classmethod
    def combined(cls, programs: Sequence[ProgramMemory], weights: Sequence[float]) -> ProgramMemory:
        """Return the weighted sum of what programs of the same parts hold, for rows of other lengths."""
        parts = zip(*(program.parts for program in programs), strict=True)
        everywhere = Amount.combined([program.everywhere for program in programs], weights)
        return cls(tuple(PartMemory.combined(one, weights) for one in parts), everywhere)

    def narrowed(self, share: float) -> ProgramMemory:
        """Return what it is for a device that has `share` of what is split."""
        return ProgramMemory(tuple(part.narrowed(share) for part in self.parts), self.everywhere.narrowed(share))

    @property
    def in_heads(self) -> ProgramMemory:
        """Return what it is where attention is shared by heads; what is recomputed then is not known piece by piece."""
        return replace(self, parts=tuple(replace(part, again=UNKNOWN) for part in self.parts))

    @property
    def in_ring(self) -> ProgramMemory:
        """Return what it is where keys and values go round in parts."""
        return replace(self, parts=tuple(part.in_ring for part in self.parts))

    def by_sequence(self, gathered: Sequence[float]) -> ProgramMemory:
        """Return what it is for context parallel groups, which gather so many bytes per row of each part."""
        pairs = zip(self.parts, gathered, strict=True)
        return ProgramMemory(tuple(part.by_sequence(count) for part, count in pairs), self.everywhere.by_sequence(0.0))


@dataclass(frozen=True, slots=True)
class StageFootprint:
    """What a stage's parts hold together: kept between forward and backward, and the most while one of them runs.

    `forward`, `backward` and `later` are above what other micro-batches keep, each a few lines whose largest counts.
    `backward` has the gradients of parameters that the first backward has made up to there, `later` has none. `largest`
    is the bytes of the largest parameter.
    """

    kept: Line
    forward: tuple[Line, ...]
    backward: tuple[Line, ...]
    later: tuple[Line, ...]
    largest: float = 0.0

    @classmethod
    def of(
        cls,
        parts: Sequence[PartMemory],
        gradients: Sequence[float],
        share: float,
        before: Line = ZERO,
        waiting: Sequence[float] = (),
        going: Callable[[float], float] | None = None,
    ) -> StageFootprint:
        """Return the footprint of consecutive parts on a device with `share` of what is split.

        Args:
            parts: in order.
            gradients: bytes of the parameters of each part there; backward makes them from the last to the first.
            share: of what is split.
            before: what the stage keeps of a micro-batch besides: what it has received, and tables of its own.
            waiting: bytes of gradients made by later parts that wait to be added, of each part; none if left out.
            going: what so many bytes of gradients, made by later parts, hold besides where they go as they come.
        """
        if len(gradients) != len(parts):
            raise PlanError(
                f"a stage has {len(parts)} parts, but gradients of {len(gradients)}\nhint: give one of each"
            )
        forward, backward, later = [], [], []
        left, waits = sum(gradients), waiting or [0.0] * len(parts)
        lines = {id(part): tuple(part.lines(share)) for part in parts}
        beside = pairwise(zip(map(id, parts), gradients, waits, strict=True))
        same = [False, *(one == other for one, other in beside), False]
        for number, part in enumerate(parts):
            left -= gradients[number]
            # what is held grows evenly over parts that are alike, so that the first or the last of them holds most
            is_inside = same[number] and same[number + 1]
            for kept, *most in lines[id(part)]:
                if not is_inside:
                    ahead, back, again = (before + line for line in most)
                    forward.append(ahead)
                    backward.append(back + Line(waits[number] + going(left - waits[number]) if going else left))
                    later.append(again + Line(waits[number]))
                before = before + kept
        largest = max((part.largest.at(0, share) for part in parts), default=0.0)
        return cls(before, uppermost(forward), uppermost(backward), uppermost(later), largest)


def maximum_at(lines: Sequence[Line], rows: float) -> float:
    """Return the most that one of the lines says."""
    return max((line(rows) for line in lines), default=0.0)
