"""HSPMD annotations (Hetu v2 section 4): which device holds which part of a tensor, and as what.

Two tiers: `top` first shares the tensor among groups of devices, then each group by its own sharding. In text, for
graphs, plan files and messages:

    [0-3] S(0, 2:1) D(2)                        one group; last axis fastest
    S(0, 3:1) over {[0,1] S(1, 2); [2]}         a union: top state, then the groups
    [0,1] S(0, 2:1, 3x_x64)                     a split of the middle factor of (3, middle, 64)

`S(dim, parts)`: parts are units `2:1`, or a number of equal parts. `D(ways)`, `P(ways)`: duplicate, partial.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hetu_fx.annotations.region import Intervals, Region, split_interval, whole
from hetu_fx.annotations.states import (
    DeviceGroup,
    Duplicate,
    Partial,
    Sharding,
    Split,
    State,
    format_group,
    format_sharding,
    format_state,
)
from hetu_fx.errors import AnnotationError

__all__ = [
    "Annotation",
    "DeviceGroup",
    "Duplicate",
    "Partial",
    "Shape",
    "Sharding",
    "Split",
    "State",
    "cotangent",
]

Shape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Annotation:
    """Says for every device which part of a tensor it holds.

    `groups` are disjoint; group i shares its piece as `shardings[i]` says. `top` (Hetu's HDim, with as many
    ways as there are groups) says how the tensor is spread over the groups, and is None iff there is one.
    A `top` split may name the dim of a bottom split: the piece is then cut again.
    """

    groups: tuple[DeviceGroup, ...]
    shardings: tuple[Sharding, ...]
    top: State | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", _one_of_its_kind(tuple(self.groups)))
        object.__setattr__(self, "shardings", _one_of_its_kind(tuple(self.shardings)))
        _check_groups(self)
        _check_top(self)
        # Hashed in every cache lookup of the resolver, so it is worked out once.
        object.__setattr__(self, "_hash", hash((self.groups, self.shardings, self.top)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        """Write the text that `parse_annotation` reads."""
        members = [
            f"{format_group(group)} {format_sharding(sharding)}".rstrip()
            for group, sharding in zip(self.groups, self.shardings, strict=True)
        ]
        return members[0] if self.top is None else f"{format_state(self.top)} over {{{'; '.join(members)}}}"

    @classmethod
    def on(cls, ranks: Sequence[int], *axes: State) -> Annotation:
        """Annotate a single group; the last of `axes` varies fastest along `ranks`."""
        return cls((DeviceGroup(tuple(ranks)),), (Sharding(axes),))

    @classmethod
    def replicated(cls, ranks: Sequence[int]) -> Annotation:
        """Give every one of `ranks` a full copy."""
        return cls.on(ranks, Duplicate(len(ranks)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, group after group."""
        return tuple(itertools.chain.from_iterable(group.ranks for group in self.groups))

    @property
    def has_partial(self) -> bool:
        """Whether any device holds a summand instead of a copy."""
        return isinstance(self.top, Partial) or any(s.num_summands > 1 for s in self.shardings)

    @property
    def copy_sets(self) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks that each hold the full value: the groups under a duplicate top, else all ranks."""
        if isinstance(self.top, Duplicate):
            return tuple(group.ranks for group in self.groups)
        return (self.ranks,)

    def holds(self, rank: int) -> bool:
        """Tell whether `rank` is named, even if its part is empty."""
        return rank in _places(self)

    def position(self, rank: int) -> int:
        """Return the position of `rank` inside its group."""
        return _place(self, rank)[1]

    def place(self, rank: int) -> tuple[int, int]:
        """Return the index of the group that `rank` is in, and its position there."""
        return _place(self, rank)

    def local_shape(self, rank: int, shape: Sequence[int | None]) -> Shape:
        """Return the shape of `rank`'s dense local tensor; None (symbolic) dims must not be split."""
        group, position = _place(self, rank)
        local = list(shape)
        for split, index in _cuts(self, group, position):
            local[split.dim] = split.local_size(_known_size(self, split, local), index)
        return tuple(local)

    def check_shape(self, shape: Sequence[int | None]) -> None:
        """Raise AnnotationError where a tensor of `shape` cannot be shared so; faster than asking every rank."""
        for index, sharding in enumerate(self.shardings):
            sizes = list(shape)
            if isinstance(self.top, Split):
                sizes[self.top.dim] = self.top.local_size(_known_size(self, self.top, sizes), index)
            for split in sharding.splits:
                split.parts(_known_size(self, split, sizes))

    def region(self, rank: int, shape: Sequence[int | None]) -> Region:
        """Return the index space that `rank` holds; a symbolic dim, never split, counts as of size 1."""
        return _region(self, rank, tuple(shape))


@lru_cache(maxsize=4096)
def _one_of_its_kind(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first of all equal tuples, so that caches compare large annotations by identity."""
    return value


def cotangent(annotation: Annotation) -> Annotation:
    """Return the annotation of a gradient: partial becomes duplicate, the rest stays."""
    if not annotation.has_partial:
        return annotation  # the same object: comparing large equal ones, as caches do, is slow
    shardings = tuple(Sharding(tuple(map(_dual, s.axes))) if s.num_summands > 1 else s for s in annotation.shardings)
    top = None if annotation.top is None else _dual(annotation.top)
    return Annotation(annotation.groups, shardings, top)


def _dual(state: State) -> State:
    return Duplicate(state.ways) if isinstance(state, Partial) else state


def _check_groups(annotation: Annotation) -> None:
    groups, shardings = annotation.groups, annotation.shardings
    if not groups or len(groups) != len(shardings):
        raise AnnotationError(
            f"an annotation needs as many shardings as groups, at least one, "
            f"got {len(groups)} groups and {len(shardings)} shardings"
        )
    for group, sharding in zip(groups, shardings, strict=True):
        if sharding.ways != len(group):
            raise AnnotationError(
                f"sharding {format_sharding(sharding) or 'of one device'} needs {sharding.ways} devices, "
                f"group {format_group(group)} has {len(group)}"
            )
    ranks = annotation.ranks
    if len(set(ranks)) != len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise AnnotationError(f"ranks {twice} are in more than one group; groups must be disjoint")


def _check_top(annotation: Annotation) -> None:
    top, number = annotation.top, len(annotation.groups)
    if (top is None) != (number == 1):
        raise AnnotationError(f"top must be None for one group and a state for several, got {top} for {number}")
    if top is not None and top.ways != number:
        raise AnnotationError(f"top {format_state(top)} has {top.ways} ways for {number} groups")


@lru_cache(maxsize=4096)
def _places(annotation: Annotation) -> Mapping[int, tuple[int, int]]:
    return {
        rank: (index, position)
        for index, group in enumerate(annotation.groups)
        for position, rank in enumerate(group.ranks)
    }


def _place(annotation: Annotation, rank: int) -> tuple[int, int]:
    place = _places(annotation).get(rank)
    if place is None:
        raise AnnotationError(f"rank {rank} holds nothing under {annotation}\nhint: ask holds(rank) first")
    return place


def _cuts(annotation: Annotation, group: int, position: int) -> list[tuple[Split, int]]:
    cuts = [(annotation.top, group)] if isinstance(annotation.top, Split) else []
    sharding = annotation.shardings[group]
    for axis, coordinate in zip(sharding.axes, sharding.coordinates(position), strict=True):
        if isinstance(axis, Split):
            cuts.append((axis, coordinate))
    return cuts


def _known_size(annotation: Annotation, split: Split, sizes: Sequence[int | None]) -> int:
    size = sizes[split.dim] if split.dim < len(sizes) else None
    if size is None:
        what = "is symbolic" if split.dim < len(sizes) else f"is not there, the shape has {len(sizes)} dims"
        raise AnnotationError(f"cannot split dim {split.dim}: it {what} (annotation {annotation})")
    return size


@lru_cache(maxsize=65536)
def _region(annotation: Annotation, rank: int, shape: Shape) -> Region:
    group, position = _place(annotation, rank)
    dims: list[Intervals] = [whole(1 if size is None else size) for size in shape]
    for split, index in _cuts(annotation, group, position):
        _known_size(annotation, split, shape)
        dims[split.dim] = split_interval(dims[split.dim], split, index)
    return Region(tuple(dims), _summand(annotation, group, position))


@lru_cache(maxsize=4096)
def _summands_before(annotation: Annotation) -> tuple[int, ...]:
    counts = [sharding.num_summands for sharding in annotation.shardings]
    return tuple(itertools.accumulate(counts, initial=0))


def _summand(annotation: Annotation, group: int, position: int) -> int | None:
    number = annotation.shardings[group].summand(position)
    if isinstance(annotation.top, Partial):
        return number + _summands_before(annotation)[group]
    return number if annotation.shardings[group].num_summands > 1 else None


_STATE = re.compile(r"S\((\d+), *([\d:]+)(?:, *(\d+)x_x(\d+))?\)|D\((\d+)\)|P\((\d+)\)")
_GROUP = re.compile(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]((?: +[SDP]\([^)]*\))*)")
_UNION = re.compile(r"([SDP]\([^)]*\)) over \{(.*)\}")


@lru_cache(maxsize=4096)
def parse_annotation(text: str) -> Annotation:
    """Read what `str(annotation)` wrote; raise AnnotationError on anything else."""
    union = _UNION.fullmatch(text.strip())
    if union is None:
        group, sharding = _parse_member(text, text)
        return Annotation((group,), (sharding,))
    members = [_parse_member(part, text) for part in union[2].split(";")]
    return Annotation(
        tuple(group for group, _ in members),
        tuple(sharding for _, sharding in members),
        _parse_state(union[1], text),
    )


def _parse_member(member: str, text: str) -> tuple[DeviceGroup, Sharding]:
    match = _GROUP.fullmatch(member.strip())
    if match is None:
        raise _malformed(member, text)
    ranks: list[int] = []
    for piece in match[1].split(","):
        first, _, last = piece.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    states = re.findall(r"[SDP]\([^)]*\)", match[2])
    return DeviceGroup(tuple(ranks)), Sharding(tuple(_parse_state(state, text) for state in states))


def _parse_state(state: str, text: str) -> State:
    match = _STATE.fullmatch(state)
    if match is None:
        raise _malformed(state, text)
    dim, parts, outer, inner, duplicate, partial = match.groups()
    if duplicate is not None:
        return Duplicate(int(duplicate))
    if partial is not None:
        return Partial(int(partial))
    units = tuple(map(int, parts.split(":"))) if ":" in parts else (1,) * int(parts)
    return Split(int(dim), units, int(outer or 1), int(inner or 1))


def _malformed(part: str, text: str) -> AnnotationError:
    return AnnotationError(
        f"cannot read {part.strip()!r} in annotation {text!r}\nhint: write it like '[0-3] S(0, 2:1) D(2)' "
        f"or 'D(2) over {{[0,1] S(0, 2); [2]}}'"
    )
