"""The loss of a step: one for all ranks, from what each contributes; its gradient back to each.

Both are sums over ranks that nobody waits for before they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.base.torch_private import make_subclass, plain_apply
from hetu_fx.comm_ops.wire.calls import note
from hetu_fx.comm_ops.wire.collectives import Exchange, sum_all
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, Round, using
from hetu_fx.comm_ops.wire.small_sums import MARKS, are_alike, pack_small_sum, refuse_unlike
from hetu_fx.errors import CommError
from hetu_fx.switching.home.async_tensor import Pending
from hetu_fx.switching.step.timer import ComputeTimer


def start_marked_sum(number: Tensor, table: GroupTable, what: str) -> Exchange[Any]:
    """Start to sum a tensor of one element over all ranks, in place; `what` it is.

    To wait for it raises DivergedError, on every rank, if some have started a sum of something else.
    """
    if (started := start_sum_by_round(number, table, what)) is not None:
        return started
    head, _ = pack_small_sum(number, dist.ReduceOp.SUM, what)
    with using(table):
        return sum_all(Flat(head), range(table.size)).then(partial(_take, number, head, table, what))


def start_sum_by_round(number: Tensor, table: GroupTable, what: str) -> Exchange[Any] | None:
    """Do what `start_marked_sum` does for a tensor on the host, where ranks can say it; None, on all, where not."""
    if table.rounds is None or not number.is_cpu or number.numel() != 1 or table.is_mixed:
        return None
    said = table.rounds.say((number.item(),), what)
    return Exchange(tuple(range(table.size)), [said], partial(_take_heard, number, said), table)


def _take_heard(number: Tensor, said: Round) -> None:
    number.fill_(sum(value for (value,) in said.heard))


def _take(number: Tensor, head: Tensor, table: GroupTable, what: str) -> None:
    *marks, total = head[: MARKS + 1].tolist()
    if not are_alike(marks, dist.ReduceOp.SUM, table.size):
        refuse_unlike(table, what)
    number.fill_(total)


@dataclass
class PredictedLossGrad:
    """What the gradient of the loss will be: that of the last step, the same on all ranks."""

    value: float = 1.0


class LossGradient:
    """The gradient of one step's loss: the average of what comes in on each rank.

    Backward runs with a guess while ranks work out the average, and what it makes is multiplied by `correction`.
    A GradScaler's scale is in the guess, so that gradients of half precision do not underflow on the way.

    Args:
        table: the ranks.
        guess: kept from step to step.
        ran_with: what backward has run with, if it has run already.
        exact: backward must not run with a guess, as its gradients are of float16: what vanished or overflowed under
            another scale does not come back by multiplying.
        step: the number of the step; ranks whose losses are of unlike steps, or models, are told so.
    """

    def __init__(
        self,
        table: GroupTable,
        guess: PredictedLossGrad,
        ran_with: float | None = None,
        *,
        exact: bool = False,
        step: int = 0,
    ) -> None:
        self.table, self.guess, self.exact = table, guess, exact
        self._what = f"backward of the loss of step {step} of model {table.number}"
        self._is_known = table.size == 1 and ran_with is None
        self._waits = exact and ran_with is None
        self._ran_with = guess.value if ran_with is None else ran_with
        self._told: Tensor | None = None
        self._sum = Exchange[Any]()
        self._correction = 1.0

    def begin(self, gradient: Tensor) -> Tensor:
        """Start to average what comes in; return what backward is to run with."""
        if self._is_known:
            return gradient
        self._told = gradient.detach().double() / self.table.size
        self._sum = start_marked_sum(self._told, self.table, self._what)
        if self._waits:
            self._sum.wait()
            self._ran_with = self._told.item()
        return torch.full_like(gradient, self._ran_with)

    def correction(self) -> float:
        """Wait for the average; return it over the guess (1 where the loss has not been asked for its gradient)."""
        if self._told is not None:
            told, self._told = self._told, None
            self._sum.wait()
            self._correct(told.item())
        return self._correction

    def ran_again(self) -> float:
        """Say that backward runs again, with the average; return that."""
        self._ran_with *= self._correction
        self._correction = 1.0
        return self._ran_with

    def _correct(self, mean: float) -> None:
        if math.isfinite(mean) and mean != 0:
            self.guess.value = mean
        self._correction = 1.0 if mean == self._ran_with or self._waits else mean / self._ran_with


class GlobalLoss(torch.autograd.Function):
    """The loss of the whole batch on every rank, from what each rank contributes."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, gradient: LossGradient, contributes: bool, scale: float, timer: ComputeTimer
    ) -> Tensor:
        """Sum the contributions of all ranks, times `scale`."""
        ctx.gradient, ctx.scale, ctx.dtype, ctx.timer = gradient, scale, local.dtype, timer
        if gradient.table.size == 1 and scale == 1.0 and contributes:
            return local.detach()
        total = local.detach() * scale if contributes else torch.zeros_like(local)
        return _summed(total, gradient.table, waits=not ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Give every rank of a stage all of the gradient."""
        note("loss.backward()")
        guessed = ctx.gradient.begin(gradient)
        ctx.timer.start()
        return (guessed if ctx.scale == 1.0 else guessed * ctx.scale).to(ctx.dtype), None, None, None, None


class PendingLoss(Pending):
    """A loss whose sum over ranks is under way; backward can start without it."""

    exchange: Exchange[Any]
    total: Tensor

    @classmethod
    def settle(cls, pending: Sequence[PendingLoss]) -> None:
        """Wait for the sums."""
        for loss in pending:
            if loss.value is None:
                loss.exchange.wait()
                loss.value = loss.total.clone()  # a script may change its loss in place

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self + 0)


class SeenLoss:
    """The number of a step's loss for those who look on: they wait for no rank, and ask for no message.

    It is as the step has returned it, whatever the script does to its tensor; no graph is kept for it.
    """

    def __init__(self, loss: Tensor | None = None) -> None:
        self._exchange, self._total = Exchange[Any](), None if loss is None or loss.numel() != 1 else loss
        if isinstance(loss, PendingLoss):
            self._exchange, self._total = loss.exchange, loss.total
        elif self._total is not None:
            self._total = self._total.detach().clone()

    @property
    def number(self) -> float | None:
        """Return it; None where there is no loss (of one number), or its sum over ranks has not arrived.

        Of a loss on a GPU it waits until the GPU has come so far, which it has once the step's compute was timed.
        """
        if self._total is None or not self._exchange.has_arrived:
            return None
        try:
            self._exchange.wait()
        except CommError:  # a rank is gone; whoever needs the loss is told so
            return None
        return self._total.item()


def apply_outside_transforms(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Run an autograd function; no step runs inside a transform of torch.func."""
    return plain_apply(function)(*arguments)


def _summed(total: Tensor, table: GroupTable, *, waits: bool) -> Tensor:
    """Sum in place over all ranks; unless it `waits`, what a rank's host would have to wait for stays pending."""
    if table.size == 1:
        return total
    exchange = _started_sum(total, table)
    if waits or not total.is_cpu:
        exchange.wait()
        return total
    loss = make_subclass(PendingLoss, total)
    loss.exchange, loss.total, loss.value = exchange, total, None
    return loss


def _started_sum(total: Tensor, table: GroupTable) -> Exchange[Any]:
    said = start_sum_by_round(total, table, f"the loss of model {table.number}")
    if said is not None:
        return said
    with using(table):
        return sum_all(Flat.over(total), range(table.size))
