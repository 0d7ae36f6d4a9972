"""hetu::split_all_reduce: the sum over groups of unequal shardings, slice by slice."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_sums
from hetu_fx.comm_ops.plans.cost import all_reduce_cost
from hetu_fx.comm_ops.plans.transition import parse_transition
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.split_run import algorithm_of_slices, reduce_slices, result_like


def _eager(x: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return reduce_slices(x, parse_transition(change), parse_algorithm(form), active())


def _fake(x: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return result_like(x, parse_transition(change), active().rank)


def _adjoint(gradient: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return gradient if cotangent == "duplicate" else call("split_all_reduce", gradient, change, cotangent, form)


SPLIT_ALL_REDUCE = CommOp(
    name="split_all_reduce",
    summary="Sums over the groups of a union. The gradient passes if duplicate over them, else is summed.",
    schema='(Tensor x, str change, str cotangent, str form="") -> Tensor',
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=all_reduce_cost,
    algorithm=algorithm_of_slices(algorithm_of_sums),
).register()
