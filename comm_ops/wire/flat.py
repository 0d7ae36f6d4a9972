"""What goes on the wire, by type: flat, dense buffers. All are made here.

A message is read from memory, and written to it, from a tensor's first element on. A view with strides, or one that is
conjugated or negated only when it is read, has other values than its memory; a copy of it is summed where nobody looks.
Zeros that autograd makes without memory (gradients of `sign` and `round`) have none to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hetu_fx.base.torch_private import is_zerotensor
from hetu_fx.errors import CommError


def is_dense(x: Tensor) -> bool:
    """Tell whether a tensor's memory is its values, one after the other."""
    return x.layout is torch.strided and x.is_contiguous() and in_memory(x) is x


def dense(x: Tensor) -> Tensor:
    """Return a tensor of no graph whose memory is its values: the same memory where it is that of `x`, else a copy."""
    x = x.detach()
    return x if is_dense(x) else in_memory(x).contiguous()


def in_memory(x: Tensor) -> Tensor:
    """Return a tensor whose elements are its values, with any strides: a copy if they are only made when it is read."""
    return x.clone() if x.is_conj() or x.is_neg() or is_zerotensor(x) else x


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A buffer on the wire: a tensor of one dim and of no graph, whose memory is its values.

    Whoever has made it sees what arrives in it; so `over` refuses what it would have to copy, and `of` is for what is
    only read.

    Raises:
        CommError: the tensor is none of that kind.
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        x = self.tensor
        if x.dim() != 1 or not is_dense(x) or x.requires_grad:
            raise CommError(
                f"a buffer on the wire is flat, dense and of no graph, but this is {_described(x)}\n"
                f"hint: send it by Flat.of, which copies it; let what arrives stand in a dense tensor"
            )

    @classmethod
    def over(cls, x: Tensor) -> Flat:
        """View all of a dense tensor, which gets what arrives. Raises CommError for any other."""
        x = x.detach()
        is_whole = x.layout is torch.strided and x.is_contiguous()
        return cls(x.view(-1) if is_whole else x)

    @classmethod
    def of(cls, x: Tensor) -> Flat:
        """Return a tensor's values to be read: where they stand if it is dense, else copied."""
        return cls(dense(x).view(-1))

    @classmethod
    def joined(cls, pieces: Sequence[Tensor]) -> Flat:
        """Lay the values of one or more tensors end to end; those of one alone may stay where they stand."""
        return cls.of(pieces[0] if len(pieces) == 1 else torch.cat([piece.detach().reshape(-1) for piece in pieces]))

    def segments(self, sizes: Sequence[int]) -> list[Flat]:
        """Cut it in views of `sizes` entries, end to end."""
        ends = list(accumulate(sizes))
        return [Flat(self.tensor[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    def as_bytes(self) -> Tensor:
        """View its memory, as what only moves it takes it: of whatever dtype it is."""
        return self.tensor.view(torch.uint8) if self.tensor.numel() else self.tensor.new_empty(0, dtype=torch.uint8)

    def copy_from(self, other: Flat) -> None:
        """Overwrite its values."""
        self.tensor.copy_(other.tensor)


def _described(x: Tensor) -> str:
    kinds = (("conjugated", x.is_conj()), ("negated", x.is_neg()), ("zero", is_zerotensor(x)))
    lazy = [word for word, holds in kinds if holds]
    graph = " of a graph" if x.requires_grad else ""
    strides = f", strides {x.stride()}" if x.layout is torch.strided else f", layout {x.layout}"
    return f"a tensor of shape {tuple(x.shape)}{strides}{''.join(f', {word} when it is read' for word in lazy)}{graph}"
