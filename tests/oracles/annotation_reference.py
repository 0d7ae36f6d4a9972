"""A global numpy array into every rank's local array and back, as `definition` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.states import Partial
from hetu_fx.errors import AnnotationError
from tests.oracles.annotation_definition import Part, parts

Array = npt.NDArray[Any]


def shard(
    array: Array, annotation: Annotation, noise: Callable[[tuple[int, ...]], Array] = np.zeros
) -> dict[int, Array]:
    """Give every rank its dense local array.

    Summands other than the first are `noise(shape)`, zeros if it is left out; the first makes up for them.
    """
    held = parts(annotation, array.shape)
    locals_: dict[int, Array] = {}
    for ranks in _summed_sets(annotation):
        count = 1 + max(held[rank].summand or 0 for rank in ranks)
        others = [noise(array.shape).astype(array.dtype) for _ in range(count - 1)]
        summands = [array - sum(others, np.zeros_like(array)), *others]
        locals_ |= {rank: cut(summands[held[rank].summand or 0], held[rank]) for rank in ranks}
    return locals_


def cut(array: Array, part: Part) -> Array:
    """Take a part out of a global array."""
    local: Array = array[part.grid] if part.dims else array
    return local.copy()


def unshard(locals_: Mapping[int, Array], annotation: Annotation, shape: tuple[int, ...], copy: int = 0) -> Array:
    """Put one copy of the global array together: the sum of its summands, each taken from its first holder.

    `copy` numbers `annotation.copy_sets`. Raises AnnotationError where a part is held by nobody, or where two
    ranks that should hold the same do not.
    """
    held = parts(annotation, shape)
    ranks = annotation.copy_sets[copy]
    value = np.zeros(shape, next(iter(locals_.values())).dtype)
    for number in sorted({held[rank].summand or 0 for rank in ranks}):
        summand, seen = _summand({r: locals_[r] for r in ranks if (held[r].summand or 0) == number}, held, value)
        # Under a split top a group may have fewer summands than another, but each has a first.
        if number == 0 and not seen.all():
            raise AnnotationError(f"{annotation} leaves parts of a tensor of shape {shape} to nobody")
        value += summand
    return value


def _summand(
    locals_: Mapping[int, Array], held: Mapping[int, Part], like: Array
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Put one summand together; tell which entries somebody holds."""
    value, seen = np.zeros_like(like), np.zeros(like.shape, bool)
    for rank, local in locals_.items():
        grid = held[rank].grid if held[rank].dims else ()
        if not np.allclose(value[grid][seen[grid]], local[seen[grid]], atol=1e-9):
            raise AnnotationError(f"rank {rank} differs from the ranks before it that hold the same")
        value[grid], seen[grid] = local, True
    return value, seen


def _summed_sets(annotation: Annotation) -> list[tuple[int, ...]]:
    if isinstance(annotation.top, Partial):
        return [annotation.ranks]
    return [group.ranks for group in annotation.groups]
