"""hetu::all_reduce: the sum of summands, on every rank (Megatron's g)."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_sums
from hetu_fx.comm_ops.plans.cost import all_reduce_cost
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.two_level import all_reduce_by


def _eager(x: Tensor, ranks: list[int], cotangent: str, form: str = "") -> Tensor:
    return all_reduce_by(x, ranks, parse_algorithm(form), active())


def _fake(x: Tensor, ranks: list[int], cotangent: str, form: str = "") -> Tensor:
    return x.new_empty(x.shape)


def _adjoint(gradient: Tensor, ranks: list[int], cotangent: str, form: str = "") -> Tensor:
    if cotangent == "duplicate":
        return gradient
    return call("all_reduce", gradient, ranks, cotangent, form)


ALL_REDUCE = CommOp(
    name="all_reduce",
    summary="Sums over `ranks`. The gradient passes if it is a duplicate there, and is summed if partial.",
    schema='(Tensor x, int[] ranks, str cotangent, str form="") -> Tensor',
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=all_reduce_cost,
    algorithm=algorithm_of_sums,
).register()
