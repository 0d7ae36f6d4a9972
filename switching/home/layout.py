"""Where home pieces lie: which elements a rank owns, and which of them it counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

import torch

from hetu_fx.annotations.annotation import Annotation, Shape
from hetu_fx.annotations.local import index, take_slice
from hetu_fx.annotations.region import Box, Intervals, Region, select
from hetu_fx.comm_ops.plans.slices import locate
from hetu_fx.errors import AnnotationError

Chunk = tuple[Box, Box]


@dataclass(frozen=True, eq=False)
class LocalPart:
    """Says which elements of a global tensor `rank` holds, as one dense tensor; it may be none.

    Attributes:
        held: whether the rank is one of those that hold the tensor.
        region: the index space of this rank's part; empty where it holds nothing.
        local_shape: the shape of the part; (0,) for a scalar that another rank holds.
    """

    annotation: Annotation
    shape: Shape
    rank: int
    held: bool = field(init=False)
    region: Region = field(init=False)
    local_shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        held = self.annotation.holds(self.rank)
        region = self.annotation.region(self.rank, self.shape) if held else Region(((),) * len(self.shape))
        set_once = object.__setattr__
        set_once(self, "held", held)
        set_once(self, "region", region)
        set_once(self, "local_shape", region.local_shape if self.shape or held else (0,))


@dataclass(frozen=True, eq=False)
class HomeLayout(LocalPart):
    """Says which elements of a parameter's global tensor `rank` owns, out of a world of `world` ranks.

    Equal layouts are one object when made by `home_layout`, so that comparing them is an identity check.
    Several ranks may own an element (`zero` 0 keeps the copies of data parallelism); exactly one *counts*
    it, so that sums and norms over the world are those of the global tensor.
    """

    shape: tuple[int, ...]
    world: int
    size: torch.Size = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "size", torch.Size(self.shape))

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of the piece in the global tensor, in local row-major order."""
        return self.region.boxes if self.held else ()

    @property
    def is_whole(self) -> bool:
        """Whether this rank's piece is the whole tensor."""
        return self.local_shape == self.shape

    @property
    def held_text(self) -> str:
        """Say which elements the rank owns: `rows 0 to 47 of 64`, `all`, `nothing`."""
        if not self.held or 0 in self.local_shape:
            return "nothing"
        cut = [(dim, runs) for dim, runs in enumerate(self.region.dims) if runs != ((0, self.shape[dim]),)]
        told = (
            f"{f'dim {dim}:' if dim else 'rows'} "
            f"{', '.join(f'{start} to {stop - 1}' for start, stop in runs)} of {self.shape[dim]}"
            for dim, runs in cut
        )
        return ", ".join(told) or "all"

    @property
    def counted(self) -> tuple[Box, ...]:
        """The boxes of the piece, in its own coordinates, whose elements this rank counts."""
        return _counted(self.annotation, self.shape, self.world)[self.rank]

    @cached_property
    def _counted_places(self) -> tuple[tuple[slice, ...], ...] | None:
        """Where the counted elements stand in the piece; None where all of them are counted."""
        counts_all = sum(box.numel for box in self.counted) == math.prod(self.local_shape)
        return None if counts_all else tuple(map(index, self.counted))

    @cached_property
    def counted_chunks(self) -> tuple[Chunk, ...]:
        """The counted elements as boxes: (in the global tensor, in the piece)."""
        return _chunks(self.region, self.counted)

    @property
    def other_chunks(self) -> tuple[Chunk, ...]:
        """The owned elements that another rank counts, as boxes: (in the global tensor, in the piece)."""
        own = self.region.local_boxes if self.held else ()
        return _chunks(self.region, _minus(own, self.counted))

    @cached_property
    def is_whole_everywhere(self) -> bool:
        """Whether every rank of the world owns the whole tensor."""
        ranks, shape = self.annotation.ranks, self.shape
        return len(ranks) == self.world and all(self.annotation.local_shape(rank, shape) == shape for rank in ranks)

    @property
    def others(self) -> tuple[HomeLayout, ...]:
        """The layouts of all ranks of the world, this one's included."""
        return tuple(home_layout(self.annotation, self.shape, r, self.world) for r in range(self.world))

    def counted_pieces(self, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give views of `local` that hold each counted element once."""
        places = self._counted_places
        return (local,) if places is None else tuple([local[place] for place in places])

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Cut this rank's piece out of the whole tensor; a view where the piece is one box."""
        if self.is_whole:
            return full
        if not self.shape or 0 in self.local_shape:
            return full.new_empty(self.local_shape)
        return take_slice(full, self.region.dims)


@lru_cache(maxsize=65536)
def home_layout(annotation: Annotation, shape: tuple[int, ...], rank: int, world: int) -> HomeLayout:
    """Make the layout of one parameter on one rank; equal arguments give the same object.

    Raises AnnotationError where the annotation names ranks outside the world, holds summands, or does not
    cover the tensor.
    """
    if annotation.has_partial:
        raise AnnotationError(f"a home layout cannot be partial, got {annotation}")
    if max(annotation.ranks) >= world or not 0 <= rank < world:
        raise AnnotationError(f"home {annotation} or rank {rank} is outside a world of {world} ranks")
    return HomeLayout(annotation, tuple(shape), rank, world)


@lru_cache(maxsize=8192)
def _counted(annotation: Annotation, shape: tuple[int, ...], world: int) -> tuple[tuple[Box, ...], ...]:
    """Give every rank its counted boxes: sharers of a region cut it evenly, an overlap is the first's."""
    sharers: dict[Region, list[int]] = {}
    for rank in annotation.ranks:
        sharers.setdefault(annotation.region(rank, shape), []).append(rank)
    counted: list[tuple[Box, ...]] = [()] * world
    seen: list[Box] = []
    disjoint = sum(math.prod(region.local_shape) for region in sharers) == math.prod(shape)
    for region, ranks in sharers.items():
        fresh = region.boxes if disjoint else _minus(region.boxes, seen)
        local = tuple(to_local(box, region) for box in fresh)
        if len(fresh) == len(region.boxes) and len(ranks) > 1:
            local_whole = Box(tuple((0, size) for size in region.local_shape))
            for rank, box in zip(ranks, _even_parts(local_whole, len(ranks)), strict=True):
                counted[rank] = (box,) if box.numel else ()
        else:
            counted[ranks[0]] = local
        seen += fresh
    return tuple(counted)


def _even_parts(box: Box, ways: int) -> list[Box]:
    """Cut a box in `ways` nearly even parts along its longest dim (a scalar stays with the first)."""
    lengths = [stop - start for start, stop in box.bounds]
    if not lengths:
        return [box] + [Box(((0, 0),))] * (ways - 1)
    dim = lengths.index(max(lengths))
    start, size = box.bounds[dim][0], lengths[dim]
    cuts = [start + size * part // ways for part in range(ways + 1)]
    return [Box((*box.bounds[:dim], (low, high), *box.bounds[dim + 1 :])) for low, high in pairwise(cuts)]


def _minus(boxes: Sequence[Box], taken: Sequence[Box]) -> tuple[Box, ...]:
    remaining = [box for box in boxes if box.numel]
    for other in taken:
        remaining = [part for box in remaining for part in _box_minus(box, other)]
    return tuple(remaining)


def _box_minus(box: Box, other: Box) -> list[Box]:
    """Cut `other` out of `box`: at most two parts per dim."""
    overlap = meeting(box.bounds, other.bounds)
    if overlap is None:
        return [box]
    parts: list[Box] = []
    bounds = list(box.bounds)
    for dim, (start, stop) in enumerate(overlap):
        low, high = bounds[dim]
        for piece in ((low, start), (stop, high)):
            if piece[0] < piece[1]:
                parts.append(Box((*bounds[:dim], piece, *bounds[dim + 1 :])))
        bounds[dim] = (start, stop)
    return parts


def _chunks(region: Region, wanted: Sequence[Box]) -> tuple[Chunk, ...]:
    """Cut boxes of a region's dense tensor where they leave one of its boxes: (in the global tensor, in the dense)."""
    parts = [
        Region(tuple(tuple(select(dim, *bounds)) for dim, bounds in zip(region.dims, box.bounds, strict=True)))
        for box in wanted
    ]
    return tuple((box, to_local(box, region)) for part in parts for box in part.boxes)


def meeting(one: Intervals, other: Intervals) -> Intervals | None:
    """Return the bounds of what two boxes of one tensor have in common, or None."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def to_local(box: Box, region: Region) -> Box:
    """Give the place of a global box, inside one of a region's boxes, in the region's dense tensor."""
    return Box(tuple(place for (place,) in locate(region.dims, tuple((bounds,) for bounds in box.bounds))))
