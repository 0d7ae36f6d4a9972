"""The bottom tier of an annotation: an ordered group of devices, and how it shares a tensor, axis by axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.annotations.states import Duplicate, Partial, Split, State, format_state
from hetu_fx.errors import AnnotationError


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
                raise AnnotationError(f"dim {dim} is split by more than one axis of {axes}; use one split")

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
