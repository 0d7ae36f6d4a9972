"""The three ways one axis of devices can share a tensor (Hetu v2 section 4.1): split, duplicate, partial.

And the bottom tier of an annotation: an ordered group of devices, and how it shares a tensor, axis by axis.
"""

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
                f"{self._factor_text()}\nhint: choose parts whose sum divides {size if rest else middle}"
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
    """Write one state, as `parse_annotation` reads it."""
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


@dataclass(frozen=True, slots=True)
class Sharding:
    """Lists the states of a group's axes; the last axis varies fastest with the position in the group.

    Axes of one way are dropped, and neighbouring duplicate (or partial) axes are merged, so that equal
    shardings are equal values. A dim may be split by one axis only.
    """

    axes: tuple[State, ...] = ()

    def __post_init__(self) -> None:
        axes = _merge_neighbours(tuple(axis for axis in self.axes if axis.ways > 1))
        object.__setattr__(self, "axes", axes)
        dims = [axis.dim for axis in axes if isinstance(axis, Split)]
        for dim in dims:
            if dims.count(dim) > 1:
                raise AnnotationError(f"dim {dim} is split by more than one axis of {axes}\nhint: use one split")

    @property
    def ways(self) -> int:
        """Number of devices it needs."""
        return math.prod(axis.ways for axis in self.axes)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The split axes, in order."""
        return tuple(axis for axis in self.axes if isinstance(axis, Split))

    def coordinates(self, position: int) -> tuple[int, ...]:
        """Turn a position in the group into one coordinate per axis."""
        coordinates = []
        for axis in reversed(self.axes):
            position, coordinate = divmod(position, axis.ways)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    @property
    def num_copies(self) -> int:
        """Product of the ways of the duplicate axes."""
        return math.prod(axis.ways for axis in self.axes if isinstance(axis, Duplicate))

    @property
    def num_summands(self) -> int:
        """Product of the ways of the partial axes."""
        return math.prod(axis.ways for axis in self.axes if isinstance(axis, Partial))

    def summand(self, position: int) -> int:
        """Number the partial coordinates of a position, last partial axis fastest (0 where there is none)."""
        number = 0
        for axis, coordinate in zip(self.axes, self.coordinates(position), strict=True):
            if isinstance(axis, Partial):
                number = number * axis.ways + coordinate
        return number


def _merge_neighbours(axes: tuple[State, ...]) -> tuple[State, ...]:
    merged: list[State] = []
    for axis in axes:
        match axis, merged[-1] if merged else None:
            case Duplicate(ways), Duplicate(others):
                merged[-1] = Duplicate(ways * others)
            case Partial(ways), Partial(others):
                merged[-1] = Partial(ways * others)
            case _:
                merged.append(axis)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Names the devices that hold a tensor; the order is that of the positions in a sharding."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = tuple(self.ranks)
        object.__setattr__(self, "ranks", ranks)
        if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise AnnotationError(f"a device group needs distinct ranks >= 0, at least one, got {ranks}")

    def __len__(self) -> int:
        return len(self.ranks)


def format_sharding(sharding: Sharding) -> str:
    """Write the axes of a sharding."""
    return " ".join(map(format_state, sharding.axes))


def format_group(group: DeviceGroup) -> str:
    """Write ranks, runs of three or more as a range."""
    pieces: list[str] = []
    for first, last in _runs(group.ranks):
        if last - first > 1:
            pieces.append(f"{first}-{last}")
        else:
            pieces += [str(rank) for rank in range(first, last + 1)]
    return f"[{','.join(pieces)}]"


def _runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] + 1 == rank:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs
