"""Where slices stand in dense local tensors, and in messages of several slices of several dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation, Shape
from hetu_fx.annotations.region import Intervals, length
from hetu_fx.comm_ops.plans.slices import Dims, locate
from hetu_fx.errors import CommError

_ALIGNMENT = 16  # bytes; a slice of any dtype may then be viewed in place


def local_dims(annotation: Annotation, rank: int, shape: Shape, dims: Dims) -> tuple[Intervals | None, ...]:
    """Return where a slice stands in `rank`'s local tensor; None is a whole (symbolic) dim."""
    located = locate(annotation.region(rank, shape).dims, dims)
    return tuple(None if size is None else held for size, held in zip(shape, located, strict=True))


def slice_shape(dims: Dims, shape: Shape, like: Tensor) -> list[int]:
    """Return the shape of a slice; symbolic sizes are those of `like`."""
    return [like.shape[dim] if size is None else length(dims[dim]) for dim, size in enumerate(shape)]


def local_shape_like(annotation: Annotation, rank: int, shape: Shape, like: Tensor) -> list[int]:
    """Return `rank`'s local shape with the symbolic sizes of `like`; empty if it holds nothing."""
    if annotation.holds(rank):
        local = annotation.local_shape(rank, shape)
    else:
        local = tuple(None if size is None else 0 for size in shape)
    return [like.shape[dim] if size is None else size for dim, size in enumerate(local)]


def check_local(x: Tensor, annotation: Annotation, rank: int, shape: Shape, what: str) -> None:
    """Raise CommError where `x` has not the shape of `rank`'s local tensor."""
    expected = annotation.local_shape(rank, shape)
    if len(expected) != x.dim() or any(e not in (None, s) for e, s in zip(expected, x.shape, strict=True)):
        raise CommError(f"{what} expects rank {rank}'s part of {annotation} in shape {expected}, got {tuple(x.shape)}")


def packed_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Count the bytes that a slice takes in a message, padding included."""
    return -(-math.prod(shape) * itemsize // _ALIGNMENT) * _ALIGNMENT


def view_message(message: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """View the slice at byte `offset` of a message."""
    flat = message.narrow(0, offset, math.prod(shape) * dtype.itemsize)
    return flat.view(dtype).view(list(shape))
