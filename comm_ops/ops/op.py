"""What a communication op is: one record with its schema, kernels, backward and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from hetu_fx.base.torch_private import OpOverload
from hetu_fx.comm_ops.plans.choose_algorithm import ChooseAlgorithm
from hetu_fx.comm_ops.plans.cost import EQUAL_LINKS, Cost


@dataclass(frozen=True, slots=True)
class OpRecord:
    """Holds what is to be known of any op `hetu::name`.

    Every op takes tensors, then ranks and layouts by value (args: ints, strings and the like), and gives new
    tensors. `eager(*inputs)` communicates, `fake(*inputs)` gives shape and dtype only, `cost(bytes, ranks, topology)`
    is the forward's seconds by the flat algorithm, and `algorithm(args, topology, choice)` chooses one from prices,
    the same on all ranks. In schemas, which saved graphs name, the argument for it is called `form`.
    """

    name: str
    summary: str
    schema: str
    eager: Callable[..., Any]
    fake: Callable[..., Any]
    cost: Cost
    algorithm: ChooseAlgorithm

    def register(self) -> Self:
        """Register the op with torch.library, and give the record back."""
        op = torch.library.custom_op(f"hetu::{self.name}", self.eager, mutates_args=(), schema=self.schema)
        op.register_fake(self.fake)
        op.register_autograd(self._backward, setup_context=self._keep)
        return self

    @property
    def overload(self) -> OpOverload[..., Any]:
        """Return the registered op, as graphs call it."""
        found: OpOverload[..., Any] = getattr(torch.ops.hetu, self.name).default
        return found

    def sends(self, args: Sequence[Any]) -> bool:
        """Tell whether a call with these arguments communicates in forward; else that is left to its backward."""
        return self.cost(1.0, (0, 1), EQUAL_LINKS) > 0

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep for the backward what it reads."""
        raise NotImplementedError

    def _backward(self, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class CommOp(OpRecord):
    """Holds all there is to know of an op that moves one tensor, x.

    The last of its args is the algorithm by which it is carried out (left out: flat). `adjoint(gradient, *args)` maps
    the gradient of the result to that of x: it is linear, so nothing is kept. The bytes of `cost` are those of a rank's
    largest tensor; `algorithm` goes by the prices of the op, or, where only its adjoint communicates, of that.
    """

    adjoint: Callable[..., Tensor]

    @property
    def tensors(self) -> int:
        """Count the inputs that are tensors."""
        return 1

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.args = inputs[1:]

    def _backward(self, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (self.adjoint(*gradients, *ctx.args), *(None for _ in ctx.args))


@dataclass(frozen=True, slots=True)
class FusedOp(OpRecord):
    """Holds all there is to know of an op that computes while tensors travel, which it therefore does not give back.

    `tensors` is how many of its inputs are tensors, or None in the place of one; all of them are kept for the
    backward, and so are the results of an op that has several. `backward(inputs, results, gradients)` gives the
    gradients of the tensors by calling the op named `backward_op` (None for an op that is one), so that a backward
    graph has that op. The bytes of `cost` are those of all that travels, on all ranks together.
    """

    tensors: int
    backward: Callable[..., tuple[Tensor | None, ...]]
    backward_op: str | None

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[: self.tensors], *(output if isinstance(output, tuple) else ()))
        ctx.args = inputs[self.tensors :]

    def _backward(self, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given, results = ctx.saved_tensors[: self.tensors], ctx.saved_tensors[self.tensors :]
        found = self.backward((*given, *ctx.args), results, gradients)
        return (*found, *(None for _ in ctx.args))


def call(name: str, x: Tensor, *args: object) -> Tensor:
    """Run `hetu::name` of one tensor."""
    result: Tensor = getattr(torch.ops.hetu, name)(x, *args)
    return result
