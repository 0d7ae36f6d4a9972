"""What is asked of dtypes, in one place: which carry gradients, which autocast casts, what holds them exactly."""

from __future__ import annotations

import torch
from torch import Tensor


def carries_gradient(dtype: torch.dtype) -> bool:
    """Tell whether numbers of a dtype have gradients: real and complex ones, not whole ones and truths."""
    return dtype.is_floating_point or dtype.is_complex


def is_real(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is one of real numbers: what a loss is, what has an order, what noise is drawn in."""
    return dtype.is_floating_point


def is_complex(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is one of complex numbers."""
    return dtype.is_complex


def autocast_casts(dtype: torch.dtype) -> bool:
    """Tell whether autocast casts a dtype: real numbers, but for float64; never complex ones."""
    return dtype.is_floating_point and dtype != torch.float64


def in_double(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of double precision of the same kind of numbers; whole numbers and truths stay as they are."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def widest(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which many numbers are summed: double precision, or int64 for whole numbers and truths."""
    return in_double(dtype) if carries_gradient(dtype) else torch.int64


def as_reals(x: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones, in one more dim; others as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
