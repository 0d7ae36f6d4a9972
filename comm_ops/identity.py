"""hetu::identity: where a replicated tensor enters a split region (Megatron's f)."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.comm_ops.cost import no_cost
from hetu_fx.comm_ops.op import CommOp, call
from hetu_fx.comm_ops.wire import fresh


def _eager(x: Tensor, ranks: list[int]) -> Tensor:
    return fresh(x)


def _fake(x: Tensor, ranks: list[int]) -> Tensor:
    return x.new_empty(x.shape)


def _adjoint(gradient: Tensor, ranks: list[int]) -> Tensor:
    return call("all_reduce", gradient, ranks, "duplicate")


IDENTITY = CommOp(
    name="identity",
    summary="Keeps a replicated tensor; its gradient, partial on `ranks`, is summed.",
    schema="(Tensor x, int[] ranks) -> Tensor",
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=no_cost,
).register()
