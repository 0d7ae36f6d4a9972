"""Ops that give zero where an operand is zero, entry by entry, whatever else they are.

Summands that do not overlap go through such ops one by one, through those that are not linear too: f(a + b) is
f(a) + f(b) where at most one of a and b is not zero, and f(0) = 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetu_fx.deduction.rules.build import full_name

NONE: frozenset[int] = frozenset()
FIRST, BOTH = frozenset({0}), frozenset({0, 1})

OF_THE_FIRST = """
    silu gelu relu relu6 tanh erf sin tan asin atan sinh asinh atanh expm1 log1p sqrt square abs neg sign sgn mish elu
    selu celu leaky_relu hardswish hardshrink softshrink tanhshrink
    clone contiguous alias detach to.dtype to.device to.dtype_layout _to_copy mul.Scalar div.Tensor div.Scalar
    view reshape _unsafe_view flatten.using_ints unsqueeze squeeze squeeze.dim transpose.int permute t expand
    slice.Tensor select.int narrow split.Tensor split_with_sizes chunk unbind.int
    index.Tensor index_select
""".split()
OF_BOTH = ("mul.Tensor",)

VANISHING: Mapping[str, frozenset[int]] = {
    **{full_name(op): FIRST for op in OF_THE_FIRST},
    **{full_name(op): BOTH for op in OF_BOTH},
}
