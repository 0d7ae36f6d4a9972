"""Batch norms that average their statistics over all batches (`momentum=None`): each weighs one over their number.

Torch reads that number as a Python float, which a trace does not have; here it stays a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from hetu_fx.base.torch_private import BatchNorm, check_input_of_norm

_FORWARD = BatchNorm.forward


@contextmanager
def averaged_statistics() -> Iterator[None]:
    """Let batch norms whose momentum is None weigh a batch by a tensor in a trace, and all others be as they are."""
    with mock.patch.object(BatchNorm, "forward", _forward):
        yield


def _forward(norm: BatchNorm, x: Tensor) -> Tensor:
    batches, mean, variance = norm.num_batches_tracked, norm.running_mean, norm.running_var
    averages = norm.momentum is None and norm.training and norm.track_running_stats
    if not averages or batches is None or mean is None or variance is None:
        return _FORWARD(norm, x)
    check_input_of_norm(norm, x)
    batches.add_(1)
    of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
    normed = F.batch_norm(x, *of_batch, norm.weight, norm.bias, True, 1.0, norm.eps)  # writes those of this batch
    for running, new in zip((mean, variance), of_batch, strict=True):
        weight = batches.to(torch.promote_types(running.dtype, torch.float32)).reciprocal()
        running.copy_(running * (1 - weight) + new * weight)
    return normed
