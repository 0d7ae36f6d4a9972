"""What elements are that follow from their position alone: an affine function of the indices, or a bound on one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Affine:
    """The integer constant + sum of slopes[d] * (index in dim d); a dim of size 1 has slope 0."""

    constant: int
    slopes: tuple[int, ...] = ()

    @property
    def is_constant(self) -> bool:
        """Whether all elements are equal."""
        return not any(self.slopes)

    @property
    def is_never_negative(self) -> bool:
        """Whether no element is below zero, whatever the sizes."""
        return self.constant >= 0 and min(self.slopes, default=0) >= 0

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """Return self + times * other, with the dims of the two aligned from the right."""
        pairs = itertools.zip_longest(reversed(self.slopes), reversed(other.slopes), fillvalue=0)
        slopes = [a + times * b for a, b in pairs]
        return Affine(self.constant + times * other.constant, tuple(reversed(slopes)))


@dataclass(frozen=True, slots=True)
class AtMostZero:
    """Whether an affine function is at most zero, element by element."""

    bound: Affine

    @property
    def always(self) -> bool | None:
        """The truth of all elements, if it is the same for every position and size."""
        return self.bound.constant <= 0 if self.bound.is_constant else None


Positional = Affine | AtMostZero
TRUE, FALSE = AtMostZero(Affine(0)), AtMostZero(Affine(1))


def mapped(value: Positional | None, change: Callable[[Affine], Affine]) -> Positional | None:
    """Change an affine value, or the bound of a truth value."""
    match value:
        case Affine():
            return change(value)
        case AtMostZero(bound):
            return AtMostZero(change(bound))
    return None
