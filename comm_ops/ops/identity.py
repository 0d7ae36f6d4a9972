"""hetu::identity: where a replicated tensor enters a split region (Megatron's f)."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_sums
from hetu_fx.comm_ops.plans.cost import no_cost
from hetu_fx.comm_ops.wire.collectives import fresh


def _eager(x: Tensor, ranks: list[int], form: str = "") -> Tensor:
    return fresh(x)


def _fake(x: Tensor, ranks: list[int], form: str = "") -> Tensor:
    return x.new_empty(x.shape)


def _adjoint(gradient: Tensor, ranks: list[int], form: str = "") -> Tensor:
    return call("all_reduce", gradient, ranks, "duplicate", form)


IDENTITY = CommOp(
    name="identity",
    summary="Keeps a replicated tensor; its gradient, partial on `ranks`, is summed.",
    schema='(Tensor x, int[] ranks, str form="") -> Tensor',
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=no_cost,
    algorithm=algorithm_of_sums,
).register()
