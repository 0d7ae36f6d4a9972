"""What inputs of a graph must have in common for one compiled graph to take them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.torch_compile import Symbols
from hetu_fx.graph import meta

OpenDims = Collection[int]
"""Dims of an input that may have any size; other sizes stay as they are."""
ALL_DIMS: OpenDims = range(64)
"""Of any tensor: torch has no more."""


@dataclass(frozen=True)
class Like:
    """What is known of a tensor, in numbers."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, given: Any) -> Any:
        """Return a tensor, with numbers or symbols, as this; an open number as what it is; others as they are."""
        if isinstance(given, torch.SymInt):
            return meta.hint(given)
        if not isinstance(given, Tensor):
            return given
        sizes, strides = (tuple(map(meta.hint, all_)) for all_ in (given.shape, given.stride()))
        return cls(sizes, strides, given.dtype, given.device, given.requires_grad)

    def form(self, open_dims: OpenDims) -> TensorForm:
        """Return what it must have in common with others, sizes of these dims left out."""
        sizes = tuple(None if d in open_dims and size > 1 else size for d, size in enumerate(self.sizes))
        order, expanded = self._order()
        return TensorForm(sizes, order, expanded, self.dtype, self.device, self.requires_grad)

    def _order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        expanded = tuple(d for d, s in enumerate(self.strides) if s == 0 and self.sizes[d] > 1)
        order = tuple(sorted(range(len(self.sizes)), key=lambda d: -self.strides[d]))
        dense = all(
            size < 2 or stride == own
            for size, stride, own in zip(self.sizes, self.strides, _strides(self.sizes, order, expanded), strict=True)
        )
        return (order, expanded) if dense else (tuple(range(len(self.sizes))), ())

    @property
    def is_dense(self) -> bool:
        """Tell whether its strides follow from its sizes and an order of its dims; others are copied to be so."""
        own = _strides(self.sizes, *self._order())
        return all(s < 2 or a == b for s, a, b in zip(self.sizes, self.strides, own, strict=True))


@dataclass(frozen=True)
class TensorForm:
    """A tensor whose open sizes (None) may be anything.

    Attributes:
        sizes: its sizes; none of 0 or 1 is open.
        order: its dims, that of the largest stride first.
        expanded: dims along which it is the same.
    """

    sizes: tuple[int | None, ...]
    order: tuple[int, ...]
    expanded: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def traced(self, symbols: Symbols, like: Like) -> Tensor:
        """Return a tensor to trace with, whose open sizes are symbols."""
        pairs = zip(self.sizes, like.sizes, strict=True)
        sizes = [symbols.size(example) if size is None else size for size, example in pairs]
        strides = _strides(sizes, self.order, self.expanded)
        return symbols.tensor(sizes, strides, self.requires_grad, dtype=self.dtype, device=self.device)

    @property
    def open_dims(self) -> Iterator[int]:
        """Yield the dims of open sizes."""
        return (d for d, size in enumerate(self.sizes) if size is None)


def _strides(sizes: Sequence[Any], order: Sequence[int], expanded: Collection[int]) -> list[Any]:
    strides, step = [0] * len(sizes), 1
    for d in reversed(order):
        if d not in expanded:
            strides[d], step = step, step * (sizes[d] if isinstance(sizes[d], torch.SymInt) else max(sizes[d], 1))
    return strides


def is_number(given: Any) -> bool:
    """Tell whether an input is a number that may be any other: a size, or what tells ops that draw from each other."""
    return type(given) is int or isinstance(given, torch.SymInt)


def is_told_by_values(like: Any) -> bool:
    """Tell whether it is, or has, a size that only the values of a batch tell."""
    return meta.DATA_DEPENDENT in (like.sizes if isinstance(like, Like) else (like,))


def input_form(like: Any, open_dims: OpenDims) -> Hashable:
    """Return what an input must have in common with others: nothing, if it is a number; all, if it is no tensor."""
    return like.form(open_dims) if isinstance(like, Like) else None if is_number(like) else (type(like), like)


def exactly(inputs: Sequence[Any]) -> list[Hashable]:
    """Return all that may matter of inputs: asked at each call, so in one piece, which takes half as long."""
    return [
        (given.shape, given.stride(), given.dtype, given.requires_grad, given.device)
        if isinstance(given, Tensor)
        else (type(given), given)
        for given in inputs
    ]
