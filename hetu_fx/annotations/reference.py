"""The meaning of annotations, on numpy arrays in one process: what every algorithm is checked against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.region import Box
from hetu_fx.errors import AnnotationError

Array = npt.NDArray[Any]


def shard(array: Array, annotation: Annotation) -> dict[int, Array]:
    """Give every rank its dense local array; summand 0 takes the value and other summands zeros."""
    locals_ = {}
    for rank in annotation.ranks:
        region = annotation.region(rank, array.shape)
        local = np.zeros(region.local_shape, array.dtype)
        if not region.summand:
            for box, place in zip(region.boxes, region.local_boxes, strict=True):
                local[_index(place)] = array[_index(box)]
        locals_[rank] = local
    return locals_


def unshard(
    locals_: Mapping[int, Array], annotation: Annotation, shape: tuple[int, ...], copy: int = 0
) -> Array:
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


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box.bounds)
