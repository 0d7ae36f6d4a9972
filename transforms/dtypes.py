"""Number formats that sums cannot be made in without losing most of what is added."""

from __future__ import annotations

import torch

HALVES = (torch.float16, torch.bfloat16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch sums numbers of `dtype`."""
    return torch.float32 if dtype in HALVES else dtype
