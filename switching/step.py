"""The autograd joints of a step: home parameters in, one loss for all ranks out.

    home parameters --GatherParameters--> compute parameters --stage graph--> local loss --GlobalLoss--> loss

Backward runs the same way back: the incoming gradient is averaged over ranks, and gradients of compute parameters
are brought home in one sync, which `no_sync` leaves for a later step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.comm_ops.groups import GroupTable
from hetu_fx.switching.timer import ComputeTimer

BringHome = Callable[[Mapping[str, Tensor | None]], Mapping[str, Tensor] | None]


@dataclass(frozen=True)
class ParameterStep:
    """What GatherParameters needs: the compute tensors of this step, and how gradients get home.

    Attributes:
        homes: names of the home parameters, in the order in which they are passed.
        compute: local compute tensors by name, gathered already.
        bring_home: takes local gradients by name; returns home gradients by name, or None if it kept them back.
        timer: runs during backward.
    """

    homes: tuple[str, ...]
    compute: Mapping[str, Tensor]
    bring_home: BringHome
    timer: ComputeTimer


class GatherParameters(torch.autograd.Function):
    """Home parameters to compute parameters; gradients the other way.

    The first result is a zero that every rank adds to its loss, so that every rank takes part in the sync of
    gradients, also one that computes nothing.
    """

    @staticmethod
    def forward(ctx: Any, step: ParameterStep, *homes: Tensor) -> tuple[Tensor, ...]:
        """Return an anchor and the compute tensors, in the order of `step.compute`."""
        ctx.step = step
        anchor = torch.zeros((), dtype=torch.float64)
        return (anchor, *(tensor.detach() for tensor in step.compute.values()))

    @staticmethod
    def backward(ctx: Any, anchor: Tensor, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Bring gradients home; None for parameters whose gradients are kept back or not wanted."""
        step: ParameterStep = ctx.step
        step.timer.stop()
        home = step.bring_home(dict(zip(step.compute, gradients, strict=True)))
        if home is None:
            return (None, *(None for _ in step.homes))
        return (None, *(home.get(name) for name in step.homes))


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


class Scheduled(torch.autograd.Function):
    """The loss of a step whose backwards have run already: hands its gradients out, times the incoming one."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor | None, ...], *compute: Tensor) -> Tensor:
        """Return the loss."""
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Scale the stored gradients; they are used once."""
        factor = float(gradient)
        stored, ctx.gradients = ctx.gradients, ()
        if factor != 1.0:
            stored = tuple(None if g is None else g.mul_(factor) for g in stored)
        return (None, None, *stored)


def _summed(tensor: Tensor, table: GroupTable) -> Tensor:
    if table.size > 1:
        dist.all_reduce(tensor, group=table.base)
    return tensor
