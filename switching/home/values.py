"""Signs of the whole values that a script writes to home tensors, of which each rank keeps its own part only.

A sign is small, and alike for values that are alike but for rounding, on whatever devices they were computed. Of large
tensors some elements are looked at.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_MOST_ELEMENTS = 1 << 18
_SIGN = "sign_of_written"

_noted = 0


class Sign(NamedTuple):
    """What tells a value from others: its product with a vector of signs, its norm, and how exact its dtype is."""

    product: float
    norm: float
    eps: float

    def plus(self, other: Sign) -> Sign:
        """Return the sign of a sum; its norm is a bound."""
        return Sign(self.product + other.product, self.norm + other.norm, max(self.eps, other.eps))

    def is_like(self, other: Sign) -> bool:
        """Tell whether both may be signs of one value, computed on two devices."""
        if self == other or str(self) == str(other):  # as text: nan is not equal to itself
            return True
        tolerance = min(1e-2, 1000 * max(self.eps, other.eps)) * max(self.norm, other.norm)
        return math.isclose(self.product, other.product, rel_tol=0, abs_tol=tolerance)


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


def noted() -> int:
    """Return how many values have been noted so far."""
    return _noted


def note_value(piece: Tensor, whole: Tensor) -> None:
    """Note that a whole value was written, of which this piece is the rank's part."""
    global _noted
    _noted += 1
    setattr(piece, _SIGN, signed(whole))


def take_sign(piece: Tensor | None) -> Sign | None:
    """Return the sign of what was written last, if anything was since the last call."""
    found: Signed | None = None if piece is None else vars(piece).pop(_SIGN, None)
    return None if found is None else found.sign


def _projected(whole: Tensor) -> Tensor:
    flat = (whole if whole.layout == torch.strided else whole.to_dense()).reshape(-1)
    flat = flat[:: max(1, -(-flat.numel() // _MOST_ELEMENTS))]
    values = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double()
    signs = 1 - 2 * (torch.arange(values.numel(), device=values.device) * 2654435761 // 65536 % 2)
    return torch.stack([values @ signs.double(), torch.linalg.vector_norm(values)])


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
