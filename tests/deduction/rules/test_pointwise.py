"""What a rule calls linear adds up: of summands of whole, real and complex numbers its results are summands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hetu_fx.deduction.rules.call import make_call
from hetu_fx.deduction.rules.registry import find_rule

aten = torch.ops.aten
DTYPES = torch.float64, torch.complex128, torch.int64
KINDS = (torch.float64, torch.complex128, torch.int64, torch.int32, torch.bool)
OPS: dict[str, tuple[Any, Callable[[Tensor], tuple[Any, ...]]]] = {
    **{
        str(op): (op, lambda x: (x,))
        for op in (
            *(aten.clone.default, aten.neg.default, aten.real.default, aten.imag.default, aten._conj.default),
            *(aten.conj.default, aten.resolve_conj.default, aten.view_as_real.default, aten.abs.default),
            *(aten.sgn.default, aten.angle.default, aten.square.default),
        )
    },
    "view_as_complex": (aten.view_as_complex.default, lambda x: (x,)),
    "mul": (aten.mul.Tensor, lambda x: (x, x.new_full((), 3) + 0)),
    "div": (aten.div.Tensor, lambda x: (x, x.new_full((), 3) + 0)),
    **{f"to {kind}": (aten.to.dtype, lambda x, kind=kind: (x, kind)) for kind in KINDS},
}
LINEAR = {
    *((name, torch.complex128) for name in ("aten.real.default", "aten.imag.default", "aten.view_as_real.default")),
    *((f"aten.{name}.default", dtype) for name in ("clone", "neg", "_conj", "conj") for dtype in DTYPES[:2]),
    ("to torch.complex128", torch.float64),
    ("to torch.int32", torch.int64),
}


def summands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    if dtype is torch.int64:
        return torch.tensor([[2, -1], [3, 1]]), torch.tensor([[-2, 1], [1, 2]])
    return torch.randn(2, 2, dtype=dtype), torch.randn(2, 2, dtype=dtype)


def is_linear(op: Any, args: tuple[Any, ...], made: Any) -> bool:
    rule = find_rule(op)
    assert rule is not None
    call = make_call(op, args, {}, made, lambda x: x if isinstance(x, Tensor) else None)
    return frozenset({0}) in rule.factor(call).linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_results_of_summands_add_up_where_the_rule_says_so(name: str, dtype: torch.dtype) -> None:
    op, args_of = OPS[name]
    first, second = summands(dtype)
    try:
        whole, one, other = (op(*args_of(x)) for x in (first + second, first, second))
    except RuntimeError:  # torch has no such op for the dtype
        return
    linear = is_linear(op, args_of(first), one)
    if linear:
        added = one + other
        assert torch.allclose(added.resolve_conj(), whole.resolve_conj()), "the rule calls it linear"
    if (name, dtype) in LINEAR:
        assert linear
