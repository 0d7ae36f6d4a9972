"""Sizes of factors: products of an integer and of symbols, compared symbolically.

A size is `coefficient * atom ** power * ...`. An atom is a symbol of the captured graph, or a sum such as
`s3 + 1` taken as one opaque unit, so multiplying and dividing sizes never needs computer algebra.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

import sympy

from hetu_fx.graph import meta

Powers = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Size:
    """A product `coefficient * atoms`, with its value in the example batch.

    Attributes:
        coefficient: the integer part, at least 0.
        atoms: (name, power) of each symbolic unit, sorted by name, powers at least 1.
        hint: the value in the example batch; no part of equality.
    """

    coefficient: int
    atoms: Powers = ()
    hint: int = field(default=0, compare=False)

    @property
    def number(self) -> int | None:
        """Return the size if it is fixed by the graph, else None."""
        return None if self.atoms else self.coefficient

    def times(self, other: Size) -> Size:
        """Return the product."""
        powers = dict(self.atoms)
        for name, power in other.atoms:
            powers[name] = powers.get(name, 0) + power
        return Size(self.coefficient * other.coefficient, _sorted(powers), self.hint * other.hint)

    def over(self, other: Size) -> Size | None:
        """Return the exact quotient, or None if `other` does not divide this size for every value of the
        symbols."""
        if not other.coefficient or self.coefficient % other.coefficient:
            return None
        powers = dict(self.atoms)
        for name, power in other.atoms:
            powers[name] = powers.get(name, 0) - power
            if powers[name] < 0:
                return None
        hint = self.hint // other.hint if other.hint else 0
        return Size(self.coefficient // other.coefficient, _sorted(powers), hint)

    def __str__(self) -> str:
        parts = [name if power == 1 else f"{name}**{power}" for name, power in self.atoms]
        return "*".join(parts if parts and self.coefficient == 1 else [str(self.coefficient), *parts])


ONE = Size(1, (), 1)


def _sorted(powers: dict[str, int]) -> Powers:
    return tuple(sorted((name, power) for name, power in powers.items() if power))


@cache
def integer(value: int) -> Size:
    """Return the size of a fixed dim."""
    return Size(value, (), value)


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of the sizes; ONE for none."""
    return reduce(Size.times, sizes, ONE)


def recorded_size(size: meta.Size) -> Size:
    """Return the size of a dim as recorded in an example value (int or SymInt)."""
    if isinstance(size, int):
        return integer(size)
    expression = meta.expression(size)
    return integer(int(expression)) if expression.is_number else _symbolic(expression, meta.hint(size))


@cache
def _symbolic(expression: Any, hint: int) -> Size:
    if expression.is_Add or expression.is_Mul:  # rows * positions + rows is rows * (positions + 1)
        expression = sympy.gcd_terms(expression)
    coefficient, rest = expression.as_coeff_Mul()
    powers = rest.as_powers_dict()
    plain = coefficient.is_integer and all(power.is_integer and power > 0 for power in powers.values())
    if not plain:
        return Size(1, ((str(expression), 1),), hint)
    return Size(int(coefficient), _sorted({str(base): int(power) for base, power in powers.items()}), hint)
