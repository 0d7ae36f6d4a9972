"""What an annotation means, by index sets: the definition that everything else is checked against.

Written to be read beside Hetu v2 section 4, and to share nothing with what it checks: no intervals, no cut points,
only lists of the global indices that a rank holds, dim by dim, in local order. Slow, and meant to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.states import Partial, Sharding, Split

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds: entry (i, j, ...) of its dense local array is entry (dims[0][i], dims[1][j], ...).

    `summand` is None for a copy of the value, else the number of the summand among those that add up to it.
    """

    dims: tuple[Indices, ...]
    summand: int | None

    @property
    def grid(self) -> tuple[Indices, ...]:
        """Index a global array so that the result is this rank's local array."""
        return np.ix_(*self.dims)


def parts(annotation: Annotation, shape: Sequence[int]) -> dict[int, Part]:
    """Give what every rank holds of a tensor of `shape`, which must fit the annotation (`check_shape`)."""
    found: dict[int, Part] = {}
    for group, (members, sharding) in enumerate(zip(annotation.groups, annotation.shardings, strict=True)):
        piece = [np.arange(size) for size in shape]
        if isinstance(annotation.top, Split):
            piece[annotation.top.dim] = _cut(piece[annotation.top.dim], annotation.top, group)
        for position, rank in enumerate(members.ranks):
            dims = _cut_by_axes(piece, sharding, position)
            found[rank] = Part(tuple(dims), _summand(annotation, group, position))
    return found


def _cut_by_axes(piece: Sequence[Indices], sharding: Sharding, position: int) -> list[Indices]:
    dims = list(piece)
    for axis, coordinate in zip(sharding.axes, _coordinates(sharding, position), strict=True):
        if isinstance(axis, Split):
            dims[axis.dim] = _cut(dims[axis.dim], axis, coordinate)
    return dims


def _cut(held: Indices, split: Split, coordinate: int) -> Indices:
    """View what is held as (outer, middle, inner) and keep the coordinate's share of the middle."""
    view = held.reshape(split.outer, len(held) // (split.outer * split.inner), split.inner)
    unit = view.shape[1] // sum(split.units)
    start = unit * sum(split.units[:coordinate])
    return view[:, start : start + unit * split.units[coordinate], :].reshape(-1)


def _coordinates(sharding: Sharding, position: int) -> tuple[int, ...]:
    """Give the coordinate on every axis; the last axis varies fastest."""
    grid = np.unravel_index(position, [axis.ways for axis in sharding.axes]) if sharding.axes else ()
    return tuple(int(coordinate) for coordinate in grid)


def _summand(annotation: Annotation, group: int, position: int) -> int | None:
    """Number the summand: by the partial axes inside the group, and under a partial top group after group."""
    sharding = annotation.shardings[group]
    ways = [axis.ways for axis in sharding.axes if isinstance(axis, Partial)]
    places = zip(sharding.axes, _coordinates(sharding, position), strict=True)
    number = 0
    for axis, coordinate in places:
        if isinstance(axis, Partial):
            number = number * axis.ways + coordinate
    if not isinstance(annotation.top, Partial):
        return number if ways else None
    return number + sum(_summands_in(before) for before in annotation.shardings[:group])


def _summands_in(sharding: Sharding) -> int:
    return math.prod(axis.ways for axis in sharding.axes if isinstance(axis, Partial))
