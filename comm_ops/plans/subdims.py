"""Cutting and joining the middle factor of a dim, viewed as (outer, middle, inner)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetu_fx.errors import CommError


def part_shape(x: Tensor, dim: int, size: int, outer: int, inner: int) -> list[int]:
    """Return the shape of `x` with `dim` of size outer * size * inner."""
    shape = list(x.shape)
    shape[dim] = outer * size * inner
    return shape


def check_size(x: Tensor, dim: int, size: int, outer: int, inner: int, what: str) -> None:
    """Raise CommError where `dim` of `x` is not outer * size * inner long."""
    if x.shape[dim] != outer * size * inner:
        raise CommError(
            f"{what} expects dim {dim} of size {outer * size * inner} (outer {outer}, middle {size}, "
            f"inner {inner}), got a tensor of shape {tuple(x.shape)}"
        )


def take_part(x: Tensor, dim: int, sizes: Sequence[int], position: int, outer: int, inner: int) -> Tensor:
    """View or copy the part of `x` that `position` holds of a cut in `sizes`."""
    start, size = sum(sizes[:position]) * inner, sizes[position] * inner
    if outer == 1:
        return x.narrow(dim, start, size)
    blocks = _blocks(x, dim, outer).narrow(dim + 1, start, size)
    return blocks.reshape(part_shape(x, dim, sizes[position], outer, inner))


def join_parts(parts: Sequence[Tensor], dim: int, outer: int) -> Tensor:
    """Join the parts of all positions; the inverse of `take_part`."""
    if outer == 1:
        return torch.cat(list(parts), dim)
    return torch.cat([_blocks(part, dim, outer) for part in parts], dim + 1).flatten(dim, dim + 1)


def _blocks(x: Tensor, dim: int, outer: int) -> Tensor:
    shape = list(x.shape)
    return x.reshape([*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]])
