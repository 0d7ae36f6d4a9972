"""The axes of two or more shardings of one group, refined until they match one to one.

A split that spans several refined axes becomes pieces, coarse to fine; a piece knows the parts before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.annotations.sharding import Sharding
from hetu_fx.annotations.states import Duplicate, Partial, Split, State


@dataclass(frozen=True, slots=True)
class SplitLevel:
    """One level of a split: cuts every part of the `coarser` levels by `split.units`."""

    split: Split
    coarser: tuple[int, ...] = ()

    @property
    def ways(self) -> int:
        """Number of parts of this level."""
        return self.split.ways


Atom = SplitLevel | Duplicate | Partial


def refine(shardings: Sequence[Sharding]) -> list[tuple[Atom, ...]] | None:
    """Cut the axes of all `shardings` at their common boundaries, or give None where they do not nest.

    They must need the same number of devices. Uneven splits nest only where their units factor.
    """
    boundaries = sorted({stride for sharding in shardings for stride in _strides(sharding)}, reverse=True)
    ways = [high // low for high, low in itertools.pairwise(boundaries)]
    if math.prod(ways) != boundaries[0]:
        return None
    refined = [_refine_one(sharding, ways) for sharding in shardings]
    return [atoms for atoms in refined if atoms is not None] if None not in refined else None


def restore(atoms: Sequence[Atom]) -> Sharding:
    """Put refined axes together again."""
    axes: list[State] = []
    for atom in atoms:
        match atom:
            case SplitLevel(split, coarser) if coarser:
                axes[-1] = Split(split.dim, _outer_product(coarser, split.units), split.outer, split.inner)
            case SplitLevel(split):
                axes.append(split)
            case _:
                axes.append(atom)
    return Sharding(tuple(axes))


def _strides(sharding: Sharding) -> list[int]:
    strides = [1]
    for axis in reversed(sharding.axes):
        strides.append(strides[-1] * axis.ways)
    return strides


def _refine_one(sharding: Sharding, ways: Sequence[int]) -> tuple[Atom, ...] | None:
    atoms: list[Atom] = []
    remaining = list(ways)
    for axis in sharding.axes:
        levels: list[int] = []
        while math.prod(levels) < axis.ways:
            levels.append(remaining.pop(0))
        pieces = _levels(axis, levels)
        if pieces is None:
            return None
        atoms += pieces
    return tuple(atoms)


def _levels(axis: State, levels: Sequence[int]) -> list[Atom] | None:
    match axis:
        case Split():
            return _split_levels(axis, levels)
        case Duplicate():
            return [Duplicate(ways) for ways in levels]
        case Partial():
            return [Partial(ways) for ways in levels]


def _split_levels(split: Split, levels: Sequence[int]) -> list[Atom] | None:
    pieces: list[Atom] = []
    rest = split.units
    coarser: tuple[int, ...] = ()
    for ways in levels:
        factored = _factor(rest, ways)
        if factored is None:
            return None
        units, rest = factored
        pieces.append(SplitLevel(Split(split.dim, units, split.outer, split.inner), coarser))
        coarser = _outer_product(coarser, units) if coarser else units
    return pieces


def _factor(units: tuple[int, ...], ways: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Write `units` as the outer product of `ways` coarse and the other fine units, if it is one."""
    width = len(units) // ways
    rows = [units[start : start + width] for start in range(0, len(units), width)]
    scales = tuple(math.gcd(*row) for row in rows)
    fine = {tuple(unit // scale for unit in row) for row, scale in zip(rows, scales, strict=True) if scale}
    return (scales, fine.pop()) if len(fine) == 1 else None


def _outer_product(coarse: Sequence[int], fine: Sequence[int]) -> tuple[int, ...]:
    return tuple(a * b for a in coarse for b in fine)
