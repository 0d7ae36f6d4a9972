"""Which dtypes carry gradients is asked in one place."""

from __future__ import annotations

import re

import pytest
import torch

from hetu_fx.base.dtypes import (
    as_reals,
    autocast_casts,
    carries_gradient,
    in_double,
    is_complex,
    is_real,
    widest,
)
from tests.test_layers import MODULES

REAL = torch.float64, torch.float32, torch.float16, torch.bfloat16
COMPLEX = torch.complex128, torch.complex64
WHOLE = torch.int64, torch.int16, torch.uint8, torch.bool


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX, *WHOLE], ids=str)
def test_gradients_are_carried_by_what_autograd_lets_require_them(dtype: torch.dtype) -> None:
    def requires() -> bool:
        try:
            return torch.zeros(1, dtype=dtype, requires_grad=True).requires_grad
        except RuntimeError:
            return False

    assert carries_gradient(dtype) == requires()
    assert (is_real(dtype), is_complex(dtype)) == (dtype in REAL, dtype in COMPLEX)


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX, *WHOLE], ids=str)
def test_autocast_casts_what_torch_does(dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        cast = carries_gradient(dtype) and torch.mm(x, x).dtype == torch.bfloat16
    assert autocast_casts(dtype) == cast


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX, *WHOLE], ids=str)
def test_double_precision_keeps_the_kind_of_numbers(dtype: torch.dtype) -> None:
    double = in_double(dtype)
    assert (is_real(double), is_complex(double)) == (is_real(dtype), is_complex(dtype))
    assert torch.promote_types(double, dtype) == double
    assert double == (dtype if dtype in WHOLE else (torch.complex128 if dtype.is_complex else torch.float64))
    assert widest(dtype) == (torch.int64 if dtype in WHOLE else double)


def test_complex_numbers_are_seen_as_pairs_also_where_they_are_conjugated_lazily() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    assert as_reals(x.conj()).tolist() == [[1, -2], [3, 1]]
    assert as_reals(x.real) is not x
    assert as_reals(torch.ones(2)).shape == (2,)


def test_nobody_else_asks_a_dtype() -> None:
    asking = {
        name
        for name, path in MODULES.items()
        if re.search(r"\bis_floating_point\b|\.is_complex\b|view_as_real\(", path.read_text())
    }
    assert asking == {"hetu_fx.base.dtypes"}
