"""A split factor that shares its dim with rows or positions, whose number no annotation can say.

While such a value changes its state the dim is seen as (outer, factor, inner), and as one dim before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hetu_fx.annotations.annotation import Shape
from hetu_fx.deduction.factors.factors import FactorClass

aten = torch.ops.aten
Call = tuple[Any, ...]  # the op, then its arguments


@dataclass(frozen=True, slots=True)
class DimView:
    """A dim seen as three; of `outer` and `inner`, the sizes around the factor, one may be None (unknown)."""

    dim: int
    factor: FactorClass
    outer: int | None
    inner: int | None

    def shape(self, shape: Shape) -> Shape:
        """Return the logical shape of a value seen so."""
        return (*shape[: self.dim], self.outer, self.factor.size, self.inner, *shape[self.dim + 1 :])

    def unflattened(self, value: fx.Node, part: int) -> Call:
        """Return the call that sees the dim as three; `part` is how much of the factor the device holds."""
        sizes = [-1 if size is None else size for size in (self.outer, part, self.inner)]
        return aten.unflatten.int, value, self.dim, sizes

    def flattened(self, value: fx.Node) -> Call:
        """Return the call that makes one dim of the three again."""
        return aten.flatten.using_ints, value, self.dim, self.dim + 2
