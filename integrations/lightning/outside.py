"""Parameters of no module that runs in parallel: each process has them whole, and their gradients are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average gradients over all processes, those of a process that has none as zeros; collective.

    After each backward, also while gradients are accumulated: what has been averaged before is the same on all, and
    stays as it is.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    has = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
    has = has.to(trained[0].device)
    dist.all_reduce(has, dist.ReduceOp.MAX)
    for parameter, somewhere in zip(trained, has.tolist(), strict=True):
        if somewhere:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
