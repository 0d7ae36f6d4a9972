"""The three ways one axis of devices can share a tensor (Hetu v2 section 4.1): split, duplicate, partial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetu_fx.errors import AnnotationError


@dataclass(frozen=True, slots=True)
class Split:
    """Cuts one dim, or a sub-factor of it, in parts proportional to `units`.

    A dim of size N is viewed as (outer, M, inner) with M = N / (outer * inner). The middle factor is cut;
    part i has M * units[i] / sum(units) entries, which must be whole numbers. Units may be zero but not all.
    They are reduced by their common divisor, so equal cuts are equal values.
    """

    dim: int
    units: tuple[int, ...]
    outer: int = 1
    inner: int = 1
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        units = tuple(self.units)
        if self.dim < 0 or self.outer < 1 or self.inner < 1:
            raise AnnotationError(
                f"split needs dim >= 0, outer >= 1 and inner >= 1, got dim {self.dim}, "
                f"outer {self.outer}, inner {self.inner}"
            )
        if not units or min(units) < 0 or max(units) == 0:
            raise AnnotationError(f"split of dim {self.dim} needs units >= 0, not all zero, got {units}")
        divisor = math.gcd(*units)
        object.__setattr__(self, "units", tuple(unit // divisor for unit in units))
        # Summed up once, so that asking for every part takes linear time.
        object.__setattr__(self, "_starts", tuple(itertools.accumulate(self.units, initial=0)))

    @classmethod
    def even(cls, dim: int, ways: int, outer: int = 1, inner: int = 1) -> Split:
        """Cut `dim` in `ways` equal parts."""
        return cls(dim, (1,) * ways, outer, inner)

    @property
    def ways(self) -> int:
        """Number of parts."""
        return len(self.units)

    def parts(self, size: int) -> tuple[int, ...]:
        """Return the middle factor's part of each position, for a dim of `size`; raise where it divides not."""
        unit = self._unit(size)
        return tuple(count * unit for count in self.units)

    def bounds(self, size: int, position: int) -> tuple[int, int]:
        """Return where the part of `position` starts and stops in the middle factor."""
        unit = self._unit(size)
        return self._starts[position] * unit, self._starts[position + 1] * unit

    def local_size(self, size: int, position: int) -> int:
        """Return the length of the dim that `position` holds."""
        return self.outer * self.units[position] * self._unit(size) * self.inner

    def _unit(self, size: int) -> int:
        """Return the entries of the middle factor that one unit stands for; raise where it divides not."""
        middle, rest = divmod(size, self.outer * self.inner)
        total = self._starts[-1]
        if rest or middle % total:
            raise AnnotationError(
                f"cannot split dim {self.dim} of size {size} in parts {':'.join(map(str, self.units))}"
                f"{self._factor_text()}; choose parts whose sum divides "
                f"{size if rest else middle}"
            )
        return middle // total

    def _factor_text(self) -> str:
        if self.outer == 1 and self.inner == 1:
            return ""
        return f" of its middle factor ({self.outer} x middle x {self.inner})"


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Every position holds a full copy."""

    ways: int

    def __post_init__(self) -> None:
        _check_ways("duplicate", self.ways)


@dataclass(frozen=True, slots=True)
class Partial:
    """Every position holds a summand; the value is their sum."""

    ways: int

    def __post_init__(self) -> None:
        _check_ways("partial", self.ways)


State = Split | Duplicate | Partial


def format_state(state: State) -> str:
    """Write one state, as `hetu_fx.annotations.text` reads it."""
    match state:
        case Duplicate(ways):
            return f"D({ways})"
        case Partial(ways):
            return f"P({ways})"
        case Split(dim, units, outer, inner):
            even = len(units) > 1 and set(units) == {1}
            parts = str(len(units)) if even else ":".join(map(str, units))
            factor = f", {outer}x_x{inner}" if (outer, inner) != (1, 1) else ""
            return f"S({dim}, {parts}{factor})"


def _check_ways(kind: str, ways: int) -> None:
    if ways < 1:
        raise AnnotationError(f"{kind} needs at least 1 way, got {ways}")


def even_sizes(size: int, ways: int) -> tuple[int, ...]:
    """Cut `size` in parts that differ by one at most."""
    return proportional_sizes(size, (1,) * ways)


def proportional_sizes(size: int, units: Sequence[int]) -> tuple[int, ...]:
    """Cut `size` where the cumulated shares of `units` fall, rounded down; parts may be empty."""
    bounds = [size * share // sum(units) for share in itertools.accumulate(units, initial=0)]
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))
