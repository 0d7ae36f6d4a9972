"""Signs of the whole values that a script writes to home tensors, of which each rank keeps its own part only.

A sign is small, and alike for values that are alike but for rounding, on whatever devices they were computed. Of large
tensors some elements are looked at.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hetu_fx.base.dtypes import as_reals, carries_gradient

_MOST_ELEMENTS = 1 << 18
_SIGN = "sign_of_written"


class Sign(NamedTuple):
    """What tells a value from others: its product with a vector of signs, its norm, and how exact its dtype is."""

    product: float
    norm: float
    eps: float

    def plus(self, other: Sign | None) -> Sign:
        """Return the sign of a sum; its norm is a bound."""
        if other is None:
            return self
        return Sign(self.product + other.product, self.norm + other.norm, max(self.eps, other.eps))

    def is_like(self, other: Sign) -> bool:
        """Tell whether both may be signs of one value, computed on two devices."""
        if self == other or str(self) == str(other):  # as text: nan is not equal to itself
            return True
        tolerance = min(1e-2, 1000 * max(self.eps, other.eps)) * max(self.norm, other.norm)
        pairs = (self.product, other.product), (self.norm, other.norm)
        return all(math.isclose(one, like, rel_tol=0, abs_tol=tolerance) for one, like in pairs)


class Signed(NamedTuple):
    """A sign that may still be computed, where the value is: reading it waits."""

    numbers: Tensor
    eps: float

    @property
    def sign(self) -> Sign:
        """Return it."""
        product, norm = self.numbers.tolist()
        return Sign(product, norm, self.eps)


def signed(whole: Tensor) -> Signed:
    """Begin to compute the sign of a whole value."""
    return Signed(_projected(whole.detach()), _eps(whole.dtype))


def mark_value(piece: Tensor, whole: Tensor) -> Signed:
    """Note at a piece that it is the rank's part of a whole value that was written; return what tells that."""
    found = signed(whole)
    setattr(piece, _SIGN, found)
    return found


def take_sign(piece: Tensor | None) -> Sign | None:
    """Return the sign of what was written last, if anything was since the last call."""
    found: Signed | None = None if piece is None else vars(piece).pop(_SIGN, None)
    return None if found is None else found.sign


def _projected(whole: Tensor) -> Tensor:
    flat = (whole if whole.layout == torch.strided else whole.to_dense()).reshape(-1)
    flat = flat[:: max(1, -(-flat.numel() // _MOST_ELEMENTS))]
    values = as_reals(flat).reshape(-1).double()
    signs = 1 - 2 * (torch.arange(values.numel(), device=values.device) * 2654435761 // 65536 % 2)
    return torch.stack([values @ signs.double(), torch.linalg.vector_norm(values)])


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if carries_gradient(dtype) else 0.0
