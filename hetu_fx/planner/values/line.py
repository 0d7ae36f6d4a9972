"""What grows in proportion to something besides a part that does not: seconds by rows or bytes, bytes by rows.

Bytes also as groups hold them in shares (`Amount`). Numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from operator import add, attrgetter, sub
from typing import NamedTuple, TypeVar


class Line(NamedTuple):
    """The line `fixed + slope * x`."""

    fixed: float = 0.0
    slope: float = 0.0

    def __call__(self, x: float) -> float:
        return self.fixed + self.slope * x

    def __add__(self, other: Line) -> Line:  # type: ignore[override]
        return Line(self.fixed + other.fixed, self.slope + other.slope)

    def times(self, factor: float) -> Line:
        """Return so many times the line."""
        return Line(factor * self.fixed, factor * self.slope)

    def upper(self, other: Line) -> Line:
        """Return a line that is nowhere below either where x is 0 or more."""
        return Line(max(self.fixed, other.fixed), max(self.slope, other.slope))


ZERO = Line()


def uppermost(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the lines that are the highest somewhere where x is 0 or more, the flattest first."""
    kept: list[Line] = []
    for line in sorted(set(lines), key=lambda line: (line.slope, line.fixed)):
        while kept and (kept[-1].fixed <= line.fixed or (len(kept) > 1 and _is_covered(kept[-2], kept[-1], line))):
            kept.pop()
        kept.append(line)
    return tuple(kept)


def _is_covered(flat: Line, middle: Line, steep: Line) -> bool:
    """Tell whether a line is nowhere above both a flatter one that begins higher and a steeper one."""
    above, below = flat.fixed - middle.fixed, middle.fixed - steep.fixed
    return above * (steep.slope - middle.slope) >= below * (middle.slope - flat.slope)


T = TypeVar("T")


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
        return self.line(share)(rows)

    @property
    def in_sequence(self) -> Amount:
        """Return what a tensor parallel group that shares the sequence holds."""
        split = self.split_fixed + self.sequence_fixed, self.split_per_row + self.sequence_per_row
        return Amount(self.fixed, self.per_row, *split)

    def narrowed(self, share: float) -> Amount:
        """Return what a device holds that has `share` of what is split."""
        fixed, per_row = self.line(share)
        return Amount(fixed, per_row, 0.0, 0.0, self.sequence_fixed, self.sequence_per_row)

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

    def line(self, share: float) -> Line:
        """Return the bytes by rows on a device that has `share` of what is split."""
        rest = 1 - share
        return Line(self.fixed - self.split_fixed * rest, self.per_row - self.split_per_row * rest)


NOTHING = Amount()

_NUMBERS = attrgetter(*(field.name for field in fields(Amount)))


def weighted_sum(
    make: Callable[..., T], values: Callable[[T], Sequence[Amount]], found: Sequence[T], weights: Sequence[float]
) -> T:
    """Return what is made of the weighted sums of the amounts of each of these."""
    columns = zip(*map(values, found), strict=True)
    return make(*(Amount.combined(column, weights) for column in columns))
