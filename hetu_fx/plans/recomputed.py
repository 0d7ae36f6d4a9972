"""What a stage computes again in backward of the blocks that it recomputes, as plans say it."""

from __future__ import annotations

from typing import Literal, get_args

from hetu_fx.base.documents import nearest
from hetu_fx.errors import PlanError

RecomputedOps = Literal["all", "attention", "pointwise"]
"""Which ops of a block are computed again.

"pointwise": those that multiply no two tensors and sum (norms, activation functions, casts, masks of dropout): what
products make is kept. "attention": products of activations besides, so that what is kept is what products with weights
make (near to Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, section 5, which also
keeps what is pointwise). "all": all of them; what enters a block is kept.
"""

RECOMPUTED_OPS: tuple[str, ...] = get_args(RecomputedOps)


def check_recomputed_ops(ops: str, blocks: int, what: str) -> None:
    """Raise `PlanError` for ops of another name, or where no block is recomputed."""
    if ops not in RECOMPUTED_OPS:
        raise PlanError(f"{what} has recompute_ops {ops!r}{nearest(ops, RECOMPUTED_OPS)}")
    if ops != "all" and not blocks:
        raise PlanError(
            f"{what} has recompute_ops {ops!r}, but recomputes no block\nhint: give a recompute of 1 or more"
        )
