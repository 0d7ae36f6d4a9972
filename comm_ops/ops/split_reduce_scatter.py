"""hetu::split_reduce_scatter: the sum over unequal groups, each group its part of a dim."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.annotations.annotation import cotangent
from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_parts
from hetu_fx.comm_ops.plans.cost import ring_cost
from hetu_fx.comm_ops.plans.transition import Transition, parse_transition
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.split_run import algorithm_of_slices, result_like, scatter_slices


def _eager(x: Tensor, change: str, form: str = "") -> Tensor:
    return scatter_slices(x, parse_transition(change), parse_algorithm(form), active())


def _fake(x: Tensor, change: str, form: str = "") -> Tensor:
    return result_like(x, parse_transition(change), active().rank)


def _adjoint(gradient: Tensor, change: str, form: str = "") -> Tensor:
    parsed = parse_transition(change)
    back = Transition(parsed.target, cotangent(parsed.source), parsed.shape)
    return call("split_all_gather", gradient, str(back), "duplicate", form)


SPLIT_REDUCE_SCATTER = CommOp(
    name="split_reduce_scatter",
    summary="Sums over the groups of a union and keeps the group's part; the gradient is gathered.",
    schema='(Tensor x, str change, str form="") -> Tensor',
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=ring_cost,
    algorithm=algorithm_of_slices(algorithm_of_parts),
).register()
