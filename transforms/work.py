"""How much an op computes, as far as its rule tells."""

from __future__ import annotations

import math

from torch import fx

from hetu_fx.deduction.factors import OpFactors
from hetu_fx.graph import meta


def product_flops(node: fx.Node, op: OpFactors) -> float:
    """Return a multiply-add count: result elements times the factors contracted between operands; 0 for no product."""
    shared = (c for c in op.reduced - op.sharded if sum(c in operand.classes for operand in op.operands) > 1)
    contracted = [c.size or 1 for c in shared]
    return 2.0 * meta.numel(node) * math.prod(contracted) if contracted else 0.0
