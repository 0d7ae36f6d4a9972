"""What a part of a program holds in memory while a micro-batch goes through it; numbers only.

A part is what stands before the repeated blocks, a block, or what stands after them. A micro-batch that has gone
forward through a part leaves `kept` bytes there until its backward has passed. While it passes, more is held:
`forward` is the most above what the parts before it keep, `backward` and `later` the most above what the part itself
and those before it keep and the gradients of later parts. In `backward` the part makes its parameters' gradients, in
`later` it adds to those of earlier micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import add, attrgetter, sub

from hetu_fx.errors import PlanError


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes as a line over a micro-batch's rows.

    `split_...` is what a tensor parallel group holds in shares, `sequence_...` what it does besides if it shares the
    sequence.
    """

    fixed: float = 0.0
    per_row: float = 0.0
    split_fixed: float = 0.0
    split_per_row: float = 0.0
    sequence_fixed: float = 0.0
    sequence_per_row: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(*map(add, _NUMBERS(self), _NUMBERS(other)))

    def __sub__(self, other: Amount) -> Amount:
        return Amount(*map(sub, _NUMBERS(self), _NUMBERS(other)))

    def at(self, rows: float, share: float = 1.0) -> float:
        """Return the bytes for so many rows on a device that has `share` of what is split."""
        fixed, per_row = self.line(share)
        return fixed + per_row * rows

    @property
    def in_sequence(self) -> Amount:
        """Return what a tensor parallel group that shares the sequence holds."""
        split = self.split_fixed + self.sequence_fixed, self.split_per_row + self.sequence_per_row
        return Amount(self.fixed, self.per_row, *split)

    def narrowed(self, share: float) -> Amount:
        """Return what a device holds that has `share` of what is split."""
        return Amount(*self.line(share))

    def by_sequence(self, gathered: float) -> Amount:
        """Return what a context parallel group holds: shares of all that grows with rows, but what it gathers."""
        return Amount(self.fixed, self.per_row, 0.0, max(0.0, self.per_row - gathered))

    @classmethod
    def combined(cls, amounts: Sequence[Amount], weights: Sequence[float]) -> Amount:
        """Return the weighted sum of what grows with rows, and the weighted mean of the rest."""

        def of(name: str, total: float) -> float:
            pairs = zip(amounts, weights, strict=True)
            return float(sum(getattr(amount, name) * weight for amount, weight in pairs) / total)

        fixed = {name: of(name, sum(weights)) for name in ("fixed", "split_fixed", "sequence_fixed")}
        return cls(**fixed, **{name: of(name, 1.0) for name in ("per_row", "split_per_row", "sequence_per_row")})

    def line(self, share: float) -> tuple[float, float]:
        """Return (bytes, bytes per row) on a device that has `share` of what is split."""
        rest = 1 - share
        return self.fixed - self.split_fixed * rest, self.per_row - self.split_per_row * rest


_NUMBERS = attrgetter(*(field.name for field in fields(Amount)))


@dataclass(frozen=True, slots=True)
class PartMemory:
    """What a part keeps of a micro-batch, and the most that is held while it passes; see the module.

    `largest` is the part's largest parameter.
    """

    kept: Amount = Amount()
    forward: Amount = Amount()
    backward: Amount = Amount()
    later: Amount = Amount()
    largest: Amount = Amount()

    def recomputed(self, kept: Amount) -> PartMemory:
        """Return what it is where only `kept` is left after the forward, and the rest made again in the backward."""
        again = self.kept - kept
        return replace(self, kept=kept, backward=self.backward + again, later=self.later + again)

    @property
    def in_sequence(self) -> PartMemory:
        """Return what it is for a tensor parallel group that shares the sequence."""
        return PartMemory(*(amount.in_sequence for amount in _AMOUNTS(self)))

    @classmethod
    def combined(cls, parts: Sequence[PartMemory], weights: Sequence[float]) -> PartMemory:
        """Return the weighted sum of what parts hold."""
        columns = zip(*(_AMOUNTS(part) for part in parts), strict=True)
        return cls(*(Amount.combined(column, weights) for column in columns))

    def narrowed(self, share: float) -> PartMemory:
        """Return what it is for a device that has `share` of what is split."""
        return PartMemory(*(amount.narrowed(share) for amount in _AMOUNTS(self)))

    def by_sequence(self, gathered: float) -> PartMemory:
        """Return what it is for a context parallel group, which gathers so many bytes per row."""
        return PartMemory(*(amount.by_sequence(gathered) for amount in _AMOUNTS(self)))


_AMOUNTS = attrgetter(*(field.name for field in fields(PartMemory)))


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """What each part holds, in order; `everywhere` is kept by every stage: tables and masks that it computes itself."""

    parts: tuple[PartMemory, ...]
    everywhere: Amount = Amount()

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

    def by_sequence(self, gathered: Sequence[float]) -> ProgramMemory:
        """Return what it is for context parallel groups, which gather so many bytes per row of each part."""
        pairs = zip(self.parts, gathered, strict=True)
        return ProgramMemory(tuple(part.by_sequence(count) for part, count in pairs), self.everywhere.by_sequence(0.0))


Line = tuple[float, float]
"""(bytes, bytes per row)."""


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
        before: Line = (0.0, 0.0),
        waiting: Sequence[float] = (),
    ) -> StageFootprint:
        """Return the footprint of consecutive parts on a device with `share` of what is split.

        Args:
            parts: in order.
            gradients: bytes of the parameters of each part there; backward makes them from the last to the first.
            share: of what is split.
            before: what the stage keeps of a micro-batch besides: what it has received, and tables of its own.
            waiting: bytes of gradients made by later parts that wait to be added, of each part; none if left out.
        """
        if len(gradients) != len(parts):
            raise PlanError(f"a stage has {len(parts)} parts, but gradients of {len(gradients)}; give one of each")
        forward, backward, later = [], [], []
        for number, part in enumerate(parts):
            forward.append(_sum(before, part.forward.line(share)))
            before = _sum(before, part.kept.line(share))
            later.append(_sum(_sum(before, part.later.line(share)), (waiting[number] if waiting else 0.0, 0.0)))
            made = sum(gradients[number + 1 :]), 0.0
            backward.append(_sum(_sum(before, part.backward.line(share)), made))
        largest = max((part.largest.at(0, share) for part in parts), default=0.0)
        return cls(before, _highest(forward), _highest(backward), _highest(later), largest)


def highest_at(lines: Sequence[Line], rows: float) -> float:
    """Return the most that one of the lines says."""
    return max((fixed + per_row * rows for fixed, per_row in lines), default=0.0)


def _sum(first: Line, second: Line) -> Line:
    return first[0] + second[0], first[1] + second[1]


def _highest(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Leave out lines that are nowhere above another one."""
    fresh = sorted(set(lines), reverse=True)
    kept: list[Line] = []
    for line in fresh:
        if not any(other[0] >= line[0] and other[1] >= line[1] for other in kept):
            kept.append(line)
    return tuple(kept)
