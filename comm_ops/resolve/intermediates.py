"""Annotations made of others, to stop at on the way: summands added up, copies cut up, partial axes on top.

Cuts are made in equal parts if the size allows, else in parts that differ by one at most, along the first dim that is
not split yet and has an entry for every rank.
"""

from __future__ import annotations

import math

from hetu_fx.annotations.annotation import Annotation, Shape, cotangent
from hetu_fx.annotations.states import DeviceGroup, Duplicate, Partial, Sharding, Split, State, even_sizes


def dual(top: State | None) -> State | None:
    """Return the state of a gradient: partial becomes duplicate."""
    return Duplicate(top.ways) if isinstance(top, Partial) else top


def flatten(annotation: Annotation) -> Annotation:
    """Write a union of equal shardings as one group, its slowest axis the top, where that means the same."""
    top, sharding = annotation.top, annotation.shardings[0]
    if top is None or any(other != sharding for other in annotation.shardings):
        return annotation
    if isinstance(top, Duplicate) and sharding.num_summands > 1:
        # Groups hold equal values, but need not hold equal summands; copies inside a group do.
        return annotation
    if isinstance(top, Split) and any(split.dim == top.dim for split in sharding.splits):
        return annotation
    return Annotation.on(annotation.ranks, top, *sharding.axes)


def piece_shape(top: State | None, index: int, shape: Shape) -> Shape:
    """Return the shape of what a group holds of a tensor under `top`."""
    if not isinstance(top, Split):
        return shape
    size = shape[top.dim]
    assert size is not None  # symbolic dims are never split, which is checked first
    return (*shape[: top.dim], top.local_size(size, index), *shape[top.dim + 1 :])


def reduced_annotations(annotation: Annotation, shape: Shape) -> list[Annotation]:
    """Return the annotations of the sum of the summands: on every rank of them, or cut up among them."""
    if not annotation.has_partial:
        return []
    whole = cotangent(annotation)
    cut = _with_cuts(annotation, shape, Partial)
    return [whole] if cut is None else [cut, whole]


def scattered_annotations(annotation: Annotation, shape: Shape) -> list[Annotation]:
    """Return the annotation with every copy cut up among those that hold it, if there is one."""
    cut = _with_cuts(annotation, shape, Duplicate)
    return [] if cut is None else [cut]


def partial_on_top(annotation: Annotation) -> Annotation | None:
    """Write an annotation as a union of groups that hold a summand each, or give None where it is none."""
    if isinstance(annotation.top, Partial):
        return annotation if all(s.num_summands == 1 for s in annotation.shardings) else None
    axes = annotation.shardings[0].axes
    partial = [number for number, axis in enumerate(axes) if isinstance(axis, Partial)]
    if annotation.top is not None or len(partial) != 1:
        return None
    (number,) = partial
    return _by_coordinate(annotation, number)


def _by_coordinate(annotation: Annotation, number: int) -> Annotation:
    """Make a group of the ranks at every coordinate of one axis, and that axis the top."""
    (group,), (sharding,) = annotation.groups, annotation.shardings
    ranks: list[list[int]] = [[] for _ in range(sharding.axes[number].ways)]
    for position, rank in enumerate(group.ranks):
        ranks[sharding.coordinates(position)[number]].append(rank)
    rest = Sharding((*sharding.axes[:number], *sharding.axes[number + 1 :]))
    groups = tuple(DeviceGroup(tuple(members)) for members in ranks)
    return Annotation(groups, (rest,) * len(groups), sharding.axes[number])


def _with_cuts(annotation: Annotation, shape: Shape, kind: type[Duplicate | Partial]) -> Annotation | None:
    """Replace every axis of `kind` on both tiers by a split, or by a duplicate where no dim can be cut."""
    shardings, top = _cut_shardings(annotation, shape, kind), annotation.top
    if isinstance(top, kind):
        top = _cut_top(top.ways, shardings, shape) or Duplicate(top.ways)
    found = Annotation(annotation.groups, shardings, top)
    return None if found in (annotation, cotangent(annotation)) else found


def cut_copies(annotation: Annotation, shape: Shape) -> tuple[Sharding, ...]:
    """Return the shardings with the copies inside the groups cut up."""
    return _cut_shardings(annotation, shape, Duplicate)


def _cut_shardings(annotation: Annotation, shape: Shape, kind: type[Duplicate | Partial]) -> tuple[Sharding, ...]:
    """Replace the axes of `kind` inside the groups."""
    return tuple(
        _cut_sharding(sharding, piece_shape(annotation.top, index, shape), kind)
        for index, sharding in enumerate(annotation.shardings)
    )


def _cut_sharding(sharding: Sharding, sizes: Shape, kind: type[Duplicate | Partial]) -> Sharding:
    used = {split.dim for split in sharding.splits}
    axes: list[State] = []
    for axis in sharding.axes:
        if isinstance(axis, kind):
            axis = _cut_free_dim(axis.ways, sizes, used) or Duplicate(axis.ways)
            used |= {axis.dim} if isinstance(axis, Split) else set()
        axes.append(axis)
    return Sharding(tuple(axes))


def _cut_free_dim(ways: int, sizes: Shape, used: set[int]) -> Split | None:
    dims = [dim for dim, size in enumerate(sizes) if dim not in used and size is not None and size >= ways]
    return _about_even(dims[0], sizes[dims[0]] or 0, ways) if dims else None


def _cut_top(ways: int, shardings: tuple[Sharding, ...], shape: Shape) -> Split | None:
    """Cut a dim that no group splits, or every finest slice of one that they do (Hetu v2's layout of ZeRO)."""
    used = {split.dim for sharding in shardings for split in sharding.splits}
    free = _cut_free_dim(ways, shape, used)
    return free or next((cut for dim in sorted(used) if (cut := _cut_slices(dim, ways, shardings, shape))), None)


def _cut_slices(dim: int, ways: int, shardings: tuple[Sharding, ...], shape: Shape) -> Split | None:
    splits = [split for sharding in shardings for split in sharding.splits if split.dim == dim]
    count = math.lcm(*(sum(split.units) for split in splits))
    size = shape[dim]
    if size is None or size % count or size // count < ways or any((s.outer, s.inner) != (1, 1) for s in splits):
        return None
    return _about_even(dim, size // count, ways, outer=count)


def _about_even(dim: int, size: int, ways: int, outer: int = 1) -> Split:
    return Split(dim, even_sizes(size, ways), outer)
