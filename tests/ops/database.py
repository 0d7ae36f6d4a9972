"""torch's own operator database: every op that torch tests, with samples of what it is called with.

Needs the package `expecttest`, which torch's test utilities import.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)
"""What ops are called with: the first that an op supports, so that numbers are exact."""
READ_BEYOND = frozenset({"_segment_reduce.offsets"})
"""Ops that read and write beyond their operands where these do not fit together, and so end any process."""
MOST_SAMPLES = 24
"""How many samples of an op are looked at: some have thousands, which differ in little."""


@dataclass(frozen=True)
class OpCall:
    """One call that torch tests: `call(*args, **kwargs)`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@cache
def database() -> Mapping[str, Any]:
    """Return torch's records of ops by name; variants of an op have names of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.full_name: op for op in op_db}


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype in which an op is tried; None if it computes in none of 64 bits."""
    supported = database()[name].supported_dtypes("cpu")
    return next((dtype for dtype in DTYPES if dtype in supported), None)


def calls(name: str, seed: int) -> Iterator[OpCall]:
    """Yield calls of an op as torch tests it, the same for the same seed."""
    dtype = dtype_of(name)
    if dtype is None:
        return
    torch.manual_seed(seed)
    for sample in itertools.islice(database()[name].sample_inputs("cpu", dtype, requires_grad=False), MOST_SAMPLES):
        if not sample.kwargs.get("unsafe"):  # which reads beyond its operands where these do not fit
            yield OpCall((sample.input, *sample.args), sample.kwargs)


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a plain tensor on the host, as models have them."""
    return type(value) is Tensor and value.layout is torch.strided
