"""hetu::split_all_reduce: the sum over groups of unequal shardings, slice by slice."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.algorithm import parse_form
from hetu_fx.comm_ops.plans.choose_algorithm import form_of_sums
from hetu_fx.comm_ops.plans.cost import all_reduce_cost
from hetu_fx.comm_ops.plans.transition import parse_change
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.split_run import form_of_slices, reduce_slices, result_like


def _eager(x: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return reduce_slices(x, parse_change(change), parse_form(form), active())


def _fake(x: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return result_like(x, parse_change(change), active().rank)


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
    form=form_of_slices(form_of_sums),
).register()
