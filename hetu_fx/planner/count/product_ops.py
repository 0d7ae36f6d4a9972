"""Which ops of a program are products, of activations with weights or with each other: what stages may keep of blocks.

Those of weights are what comes down to a product of two matrices when it runs, which is what the runtime keeps by
(`transforms.lowering.checkpoint`); a batch of products, of experts say, counts with those of activations.
"""

from __future__ import annotations

import math

from torch import fx

from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.reshard_cost import contracted_sizes
from hetu_fx.transforms.layouts.sequence_parallel import is_product


def multiplies_weights(node: fx.Node, factors: FactorMap, flow: Flow) -> bool:
    """Tell whether an op multiplies what depends on the batch with what does not, matrix by matrix."""
    if not multiplies(node, factors):
        return False
    op = factors.op(node)
    others = [o.classes for o in op.read if flow.through_inputs(o.node)]
    weights = [o.classes for o in op.read if not flow.through_inputs(o.node)]
    pairs = [(w, other) for w in weights for other in others if (w & other) - op.made]
    return bool(pairs) and all(not w & other & op.made for w, other in pairs)


def multiplies(node: fx.Node, factors: FactorMap) -> bool:
    """Tell whether an op is a product."""
    return factors.is_op(node) and is_product(factors.op(node))


def contracted_size(node: fx.Node, factors: FactorMap) -> int:
    """Return the size over which an op sums products of two operands, as its rule says; 0 if it is not known to."""
    known = [size for size in contracted_sizes(factors.op(node)) if size] if factors.is_op(node) else []
    return math.prod(known) if known else 0
