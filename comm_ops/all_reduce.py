"""hetu::all_reduce: the sum of summands, on every rank (Megatron's g)."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.comm_ops.cost import all_reduce_cost
from hetu_fx.comm_ops.groups import active
from hetu_fx.comm_ops.op import CommOp, call
from hetu_fx.comm_ops.wire import sum_over


def _eager(x: Tensor, ranks: list[int], cotangent: str) -> Tensor:
    return sum_over(x, ranks, active())


def _fake(x: Tensor, ranks: list[int], cotangent: str) -> Tensor:
    return x.new_empty(x.shape)


def _adjoint(gradient: Tensor, ranks: list[int], cotangent: str) -> Tensor:
    if cotangent == "duplicate":
        return gradient
    return call("all_reduce", gradient, ranks, cotangent)


ALL_REDUCE = CommOp(
    name="all_reduce",
    summary="Sums over `ranks`. The gradient passes if it is a duplicate there, and is summed if partial.",
    schema="(Tensor x, int[] ranks, str cotangent) -> Tensor",
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=all_reduce_cost,
).register()
