"""The meaning of annotations, on numpy arrays in one process: what every algorithm is checked against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.region import Box, Region
from hetu_fx.annotations.states import Partial
from hetu_fx.errors import AnnotationError

Array = npt.NDArray[Any]


def shard(
    array: Array, annotation: Annotation, noise: Callable[[tuple[int, ...]], Array] = np.zeros
) -> dict[int, Array]:
    """Give every rank its dense local array.

    Summands other than the first are `noise(shape)`, zeros if it is left out; the first makes up for them.
    """
    locals_: dict[int, Array] = {}
    for group in _summed_sets(annotation):
        regions = {rank: annotation.region(rank, array.shape) for rank in group}
        count = 1 + max(region.summand or 0 for region in regions.values())
        others = [noise(array.shape).astype(array.dtype) for _ in range(count - 1)]
        summands = [array - sum(others, np.zeros_like(array)), *others]
        locals_ |= {rank: cut(summands[region.summand or 0], region) for rank, region in regions.items()}
    return locals_


def cut(array: Array, region: Region) -> Array:
    """Take a region out of a global array."""
    local = np.zeros(region.local_shape, array.dtype)
    for box, place in zip(region.boxes, region.local_boxes, strict=True):
        local[_index(place)] = array[_index(box)]
    return local


def unshard(locals_: Mapping[int, Array], annotation: Annotation, shape: tuple[int, ...], copy: int = 0) -> Array:
    """Put one copy of the global array together: the sum of its summands, each taken from its first holder.

    `copy` numbers `annotation.copy_sets`. Raises AnnotationError where a part is held by nobody.
    """
    ranks = annotation.copy_sets[copy]
    summand = {rank: annotation.region(rank, shape).summand or 0 for rank in ranks}
    value = np.zeros(shape, next(iter(locals_.values())).dtype)
    for number in sorted(set(summand.values())):
        seen = np.zeros(shape, bool)
        for rank in ranks:
            if summand[rank] == number:
                _add_unseen(value, seen, locals_[rank], annotation, rank)
        if number == 0 and not seen.all():
            raise AnnotationError(f"{annotation} leaves parts of a tensor of shape {shape} to nobody")
    return value


def _add_unseen(value: Array, seen: npt.NDArray[np.bool_], local: Array, a: Annotation, rank: int) -> None:
    region = a.region(rank, value.shape)
    for box, place in zip(region.boxes, region.local_boxes, strict=True):
        where = _index(box)
        value[where] += np.where(seen[where], 0, local[_index(place)])
        seen[where] = True


def _summed_sets(annotation: Annotation) -> list[tuple[int, ...]]:
    if isinstance(annotation.top, Partial):
        return [annotation.ranks]
    return [group.ranks for group in annotation.groups]


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box.bounds)
