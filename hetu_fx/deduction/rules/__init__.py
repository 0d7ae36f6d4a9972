"""Op rules, one file per family, and the table of all of them."""

from __future__ import annotations

from collections.abc import Mapping

from hetu_fx.deduction.rule import Rule
from hetu_fx.deduction.rules import (
    attention,
    convolution,
    creation,
    embedding,
    loss,
    matmul,
    normalization,
    pointwise,
    random,
    recurrent,
    reduction,
    routing,
    slicing,
    spectral,
    view,
)

FAMILIES = (
    pointwise,
    matmul,
    reduction,
    view,
    slicing,
    normalization,
    attention,
    embedding,
    loss,
    convolution,
    spectral,
    random,
    recurrent,
    routing,
    creation,
)
RULES: Mapping[str, Rule] = {rule.op: rule for family in FAMILIES for rule in family.RULES}
