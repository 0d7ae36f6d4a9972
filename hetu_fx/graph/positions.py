"""What is known of elements that follow from their position alone: affine functions of the indices, bounds on them.

Export writes masks out as arithmetic on index ranges. Reading that arithmetic back as what it means needs no value of
any batch, and holds for every size. `position_readers` reads a `PositionedCall` for each op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.calls import arguments


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


Known = Mapping[fx.Node, Positional]


@dataclass(frozen=True, slots=True)
class PositionedCall:
    """A call and what is known of its operands."""

    node: fx.Node
    known: Known

    def given(self, name: str) -> Any:
        """Return an argument as the graph has it."""
        return arguments(self.node)[name]

    def value(self, name: str) -> Positional | None:
        """Return what an argument is, tensor or number, if that is known."""
        return self.value_of(self.given(name))

    def value_of(self, item: object) -> Positional | None:
        """Return what a node or a number is, if that is known."""
        match item:
            case bool():
                return TRUE if item else FALSE
            case int():
                return Affine(item)
            case fx.Node():
                return self.known.get(item)
        return None

    def affine(self, name: str) -> Affine | None:
        """Return an argument that is an affine integer."""
        value = self.value(name)
        return value if isinstance(value, Affine) else None

    @property
    def ndim(self) -> int:
        """The number of dims of the first argument."""
        return len(meta.shape(self.node.args[0]))  # type: ignore[arg-type]

    @property
    def is_integral(self) -> bool:
        """Whether the result holds integers, which arithmetic here is exact for."""
        dtype = meta.dtype(self.node)
        return not dtype.is_floating_point and not dtype.is_complex
