"""How far a tensor is from its reference: relative to the norm, and as a cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hetu_fx.base.dtypes import as_reals, carries_gradient

MASKING = 1e30
"""Numbers beyond this mask something: no norm is made of them, each must be as its reference is."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor beside its reference.

    Attributes:
        error: norm of the difference relative to the reference's norm; share of unequal elements where they are whole
            numbers or truth values; infinite where shapes, masks or what is not finite differ.
        cosine: of the angle between both; 1 where both are zero.
    """

    error: float
    cosine: float


EQUAL = Difference(0.0, 1.0)
APART = Difference(math.inf, 0.0)


NEGLIGIBLE = 1e-6
"""A reference that is so much smaller than what it is made with is zero but for rounding: it is compared with that."""


def difference(made: Tensor, reference: Tensor, scale: float = 0.0) -> Difference:
    """Compare a tensor with its reference, in float64.

    Args:
        made: the tensor.
        reference: what it should be.
        scale: root mean square of what both are made with, or made beside; 0: not known.
    """
    if made.shape != reference.shape:
        return APART
    if not carries_gradient(reference.dtype):
        return _of_whole_numbers(made, reference)
    one, other = map(as_reals, (made, reference))
    one, other = (t.detach().to("cpu", torch.float64).flatten() for t in (one, other))
    plain = other.abs() < MASKING  # false also for what is no number
    if not _same_masks(one[~plain], other[~plain]) or not bool(one[plain].isfinite().all()):
        return APART
    return _of_vectors(one[plain], other[plain], scale)


def _of_whole_numbers(made: Tensor, reference: Tensor) -> Difference:
    if not made.numel():
        return EQUAL
    share = float((made.cpu() != reference.cpu()).double().mean())
    return Difference(share, 1.0 - share)


def _same_masks(one: Tensor, other: Tensor) -> bool:
    """Tell whether what masks does so in both: the same infinities, and no number nearer to zero than the bound."""
    signs = torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num().sign(), other.nan_to_num().sign())
    return signs and bool((one.isnan() | (one.abs() >= MASKING)).all())


def _of_vectors(one: Tensor, other: Tensor, scale: float) -> Difference:
    norm, own = float(other.norm()), float(one.norm())
    apart, whole = float((one - other).norm()), scale * math.sqrt(other.numel())
    if norm <= NEGLIGIBLE * whole:
        return Difference(apart / whole, 1.0) if whole else EQUAL if not own else APART
    return Difference(apart / norm, float(one @ other) / norm / own if own else 0.0)


def scale_of(tensors: Iterable[Tensor]) -> float:
    """Return the largest root mean square of the tensors of real and complex numbers, without what masks."""
    return max((_root_mean_square(tensor) for tensor in tensors if carries_gradient(tensor.dtype)), default=0.0)


def _root_mean_square(tensor: Tensor) -> float:
    flat = as_reals(tensor.detach()).to("cpu", torch.float64).flatten()
    plain = flat[flat.abs() < MASKING]
    return float(plain.norm()) / math.sqrt(plain.numel()) if plain.numel() else 0.0
