"""What a block holds that is computed again in backward, piece by piece; numbers only (`planner.pieces` finds them)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from hetu_fx.planner.values.affine import NOTHING, Amount, combined


@dataclass(frozen=True, slots=True)
class Segment:
    """What stands between two messages of a block that is computed again in backward: it comes back by itself.

    `kept` is what is left after the forward, `sent` what is besides since it was sent; `forward`, `backward` and
    `later` are the most above what earlier parts and pieces leave, `backward` with the gradients of the block's later
    pieces.
    """

    kept: Amount = NOTHING
    sent: Amount = NOTHING
    forward: Amount = NOTHING
    backward: Amount = NOTHING
    later: Amount = NOTHING

    def by_sequence(self, received: float) -> Segment:
        """Return what it is for a context parallel group, from which it has received so many bytes per row."""
        kept, sent = self.kept.by_sequence(0.0), self.sent.by_sequence(self.gathered)
        return Segment(kept, sent, *(a.by_sequence(received) for a in (self.forward, self.backward, self.later)))

    @property
    def gathered(self) -> float:
        """Return the bytes per row of what was sent that every device of a context parallel group has the whole of."""
        return self.sent.per_row - self.sent.sequence_per_row


Segments = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Again:
    """The pieces of a block by how the devices of its stage share work; none where they are not known.

    One device alone, tensor parallel ones that share the sequence or do not, context parallel ones, and a grid of both.
    """

    alone: Segments = ()
    tensor: Segments = ()
    sequence: Segments = ()
    context: Segments = ()
    grid: Segments = ()

    def each(self, change: Callable[[Segments], Segments]) -> Again:
        """Return the same with all pieces changed."""
        return self if self == UNKNOWN else Again(*map(change, _WAYS(self)))

    def amounts(self, change: Callable[[Amount], Amount]) -> Again:
        """Return the same with all amounts changed."""
        return self.each(lambda pieces: tuple(Segment(*map(change, _PIECE(piece))) for piece in pieces))

    @property
    def in_sequence(self) -> Again:
        """Return what it is for tensor parallel groups that share the sequence: `tensor` is `sequence` then."""
        shared = self.amounts(lambda amount: amount.in_sequence)
        return replace(shared, tensor=shared.sequence)

    @property
    def by_sequence(self) -> Again:
        """Return what it is for a context parallel group."""
        return self.each(_by_sequence)

    @classmethod
    def combined(cls, found: Sequence[Again], weights: Sequence[float]) -> Again:
        """Return the weighted sum; nothing where the pieces differ."""
        ways = list(zip(*map(_WAYS, found), strict=True))
        if any(len(set(map(len, pieces))) > 1 for pieces in ways):
            return cls()
        columns = (zip(*pieces, strict=True) for pieces in ways)
        return cls(*(tuple(combined(Segment, _PIECE, column, weights) for column in pieces) for pieces in columns))


UNKNOWN = Again()

_WAYS = attrgetter(*(field.name for field in fields(Again)))
_PIECE = attrgetter(*(field.name for field in fields(Segment)))


def _by_sequence(pieces: Segments) -> Segments:
    received = (0.0, *(piece.gathered for piece in pieces))
    return tuple(piece.by_sequence(count) for piece, count in zip(pieces, received, strict=False))
