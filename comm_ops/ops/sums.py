"""The ops between summands and their sum: all_reduce (Megatron's g) and, in the backward alone, identity (its f)."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_sums
from hetu_fx.comm_ops.plans.cost import all_reduce_cost, no_cost
from hetu_fx.comm_ops.wire.collectives import fresh
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.two_level import all_reduce_by


def _sum(x: Tensor, ranks: list[int], cotangent: str, form: str = "") -> Tensor:
    return all_reduce_by(x, ranks, parse_algorithm(form), active())


def _fake_sum(x: Tensor, ranks: list[int], cotangent: str, form: str = "") -> Tensor:
    return x.new_empty(x.shape)


def _adjoint_of_sum(gradient: Tensor, ranks: list[int], cotangent: str, form: str = "") -> Tensor:
    if cotangent == "duplicate":
        return gradient
    return call("all_reduce", gradient, ranks, cotangent, form)


def _keep(x: Tensor, ranks: list[int], form: str = "") -> Tensor:
    return fresh(x)


def _fake_kept(x: Tensor, ranks: list[int], form: str = "") -> Tensor:
    return x.new_empty(x.shape)


def _adjoint_of_keep(gradient: Tensor, ranks: list[int], form: str = "") -> Tensor:
    return call("all_reduce", gradient, ranks, "duplicate", form)


ALL_REDUCE = CommOp(
    name="all_reduce",
    summary="Sums over `ranks`. The gradient passes if it is a duplicate there, and is summed if partial.",
    schema='(Tensor x, int[] ranks, str cotangent, str form="") -> Tensor',
    eager=_sum,
    fake=_fake_sum,
    adjoint=_adjoint_of_sum,
    cost=all_reduce_cost,
    algorithm=algorithm_of_sums,
).register()

IDENTITY = CommOp(
    name="identity",
    summary="Keeps a replicated tensor; its gradient, partial on `ranks`, is summed.",
    schema='(Tensor x, int[] ranks, str form="") -> Tensor',
    eager=_keep,
    fake=_fake_kept,
    adjoint=_adjoint_of_keep,
    cost=no_cost,
    algorithm=algorithm_of_sums,
).register()
