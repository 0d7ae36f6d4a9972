"""What a communication op is: one record with its schema, kernels, adjoint and cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetu_fx.comm_ops.choose_form import ChooseForm
from hetu_fx.comm_ops.cost import Cost


@dataclass(frozen=True, slots=True)
class CommOp:
    """Holds all there is to know of the op `hetu::name`.

    Every op takes a tensor x, then ranks and layouts by value (args: ints and strings), the last the form in
    which it is carried out (left out: flat), and gives a new tensor. `eager(x, *args)` communicates,
    `fake(x, *args)` gives shape and dtype only, `adjoint(gradient, *args)` maps the gradient of the result to
    that of x, `cost(bytes, ranks, topology)` is the forward's seconds in its flat form, bytes being those of a
    rank's largest tensor, and `form(args, topology, choice)` chooses the form, the same on all ranks, from the
    prices of the op, or, where only its adjoint communicates, of that.
    """

    name: str
    summary: str
    schema: str
    eager: Callable[..., Tensor]
    fake: Callable[..., Tensor]
    adjoint: Callable[..., Tensor]
    cost: Cost
    form: ChooseForm

    def register(self) -> CommOp:
        """Register the op with torch.library, and give the record back."""
        op = torch.library.custom_op(f"hetu::{self.name}", self.eager, mutates_args=(), schema=self.schema)
        op.register_fake(self.fake)
        op.register_autograd(self._backward, setup_context=_keep_args)
        return self

    @property
    def overload(self) -> torch._ops.OpOverload[..., Any]:
        """Return the registered op, as graphs call it."""
        found: torch._ops.OpOverload[..., Any] = getattr(torch.ops.hetu, self.name).default
        return found

    def _backward(self, ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (self.adjoint(gradient, *ctx.args), *(None for _ in ctx.args))


def _keep_args(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.args = inputs[1:]


def call(name: str, x: Tensor, *args: object) -> Tensor:
    """Run `hetu::name`."""
    result: Tensor = getattr(torch.ops.hetu, name)(x, *args)
    return result
