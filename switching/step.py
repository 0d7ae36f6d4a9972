"""The loss of a step: one for all ranks, from what each contributes; its gradient back to each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.comm_ops.groups import GroupTable, using
from hetu_fx.switching.exchange import reduce_world
from hetu_fx.switching.timer import ComputeTimer


class GlobalLoss(torch.autograd.Function):
    """The loss of the whole batch on every rank, from what each rank contributes."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, table: GroupTable, contributes: bool, scale: float, timer: ComputeTimer
    ) -> Tensor:
        """Sum the contributions of all ranks, times `scale`."""
        ctx.table, ctx.scale, ctx.dtype, ctx.timer = table, scale, local.dtype, timer
        total = local.detach().clone() if contributes else torch.zeros_like(local)
        return _summed(total, table) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Average the incoming gradient over ranks; every rank of a stage gets all of it."""
        mean = _summed(gradient.detach().clone(), ctx.table) / ctx.table.size
        ctx.timer.start()
        return (mean * ctx.scale).to(ctx.dtype), None, None, None, None


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Run an autograd function; torch leaves `apply` without types."""
    return function.apply(*arguments)


def _summed(tensor: Tensor, table: GroupTable) -> Tensor:
    with using(table):
        return reduce_world(tensor, table.size, dist.ReduceOp.SUM)
