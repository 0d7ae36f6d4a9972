"""Which of torch's ops keep what they make where a stage recomputes only some: contexts of torch.utils.checkpoint.

A table of the ops that products come to, whatever the model calls them: `aten.linear` is `mm` or `addmm` then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hetu_fx.comm_ops.ops.overlapped_products import GATHERED_PRODUCTS
from hetu_fx.plans.recomputed import RecomputedOps
from hetu_fx.transforms.rewrites import sequence_ops  # noqa: F401 - registers hetu::sequence_attention_forward


def _ops(*names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name).default for name in names)


_OF_WEIGHTS = _ops("mm", "addmm", "_scaled_mm", "convolution") | {GATHERED_PRODUCTS.overload}
"""Products of two matrices: no op on a batch of them is one."""

_OF_ACTIVATIONS = _ops(
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
) | {torch.ops.hetu.sequence_attention_forward.default}

SAVED: Mapping[RecomputedOps, frozenset[Any]] = {
    "all": frozenset(),
    "attention": _OF_WEIGHTS,
    "pointwise": _OF_WEIGHTS | _OF_ACTIVATIONS,
}


def contexts_of(ops: RecomputedOps) -> Callable[[], Any]:
    """Return what `torch.utils.checkpoint` takes as `context_fn` for those ops to be recomputed; not for all."""
    return partial(create_selective_checkpoint_contexts, partial(_policy, SAVED[ops]))


def _policy(saved: frozenset[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE
