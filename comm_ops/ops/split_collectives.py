"""The ops across unequal groups, slice by slice: split_all_reduce, split_reduce_scatter and split_all_gather."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.annotations.annotation import Annotation, cotangent
from hetu_fx.annotations.states import Partial
from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_parts, algorithm_of_sums
from hetu_fx.comm_ops.plans.cost import all_reduce_cost, ring_cost
from hetu_fx.comm_ops.plans.transition import Transition, parse_transition
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.split_run import (
    algorithm_of_slices,
    gather_slices,
    reduce_slices,
    result_like,
    scatter_slices,
)

_SCHEMA = '(Tensor x, str change, str cotangent, str form="") -> Tensor'


def _fake(x: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return result_like(x, parse_transition(change), active().rank)


def _reduce(x: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return reduce_slices(x, parse_transition(change), parse_algorithm(form), active())


def _adjoint_of_reduce(gradient: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return gradient if cotangent == "duplicate" else call("split_all_reduce", gradient, change, cotangent, form)


def _gather(x: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return gather_slices(x, parse_transition(change), parse_algorithm(form), active())


def _adjoint_of_gather(gradient: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    parsed = parse_transition(change)
    source, target, shape = parsed.source, parsed.target, parsed.shape
    if cotangent == "partial":
        target = Annotation(target.groups, target.shardings, Partial(len(target.groups)))
        return call("split_reduce_scatter", gradient, str(Transition(target, source, shape)), form)
    return call("batched_send_receive", gradient, str(Transition(target, source, shape)), "", form)


def _scatter(x: Tensor, change: str, form: str = "") -> Tensor:
    return scatter_slices(x, parse_transition(change), parse_algorithm(form), active())


def _fake_scattered(x: Tensor, change: str, form: str = "") -> Tensor:
    return _fake(x, change, "", form)


def _adjoint_of_scatter(gradient: Tensor, change: str, form: str = "") -> Tensor:
    parsed = parse_transition(change)
    back = Transition(parsed.target, cotangent(parsed.source), parsed.shape)
    return call("split_all_gather", gradient, str(back), "duplicate", form)


SPLIT_ALL_REDUCE = CommOp(
    name="split_all_reduce",
    summary="Sums over the groups of a union. The gradient passes if duplicate over them, else is summed.",
    schema=_SCHEMA,
    eager=_reduce,
    fake=_fake,
    adjoint=_adjoint_of_reduce,
    cost=all_reduce_cost,
    algorithm=algorithm_of_slices(algorithm_of_sums),
).register()

SPLIT_REDUCE_SCATTER = CommOp(
    name="split_reduce_scatter",
    summary="Sums over the groups of a union and keeps the group's part; the gradient is gathered.",
    schema='(Tensor x, str change, str form="") -> Tensor',
    eager=_scatter,
    fake=_fake_scattered,
    adjoint=_adjoint_of_scatter,
    cost=ring_cost,
    algorithm=algorithm_of_slices(algorithm_of_parts),
).register()

SPLIT_ALL_GATHER = CommOp(
    name="split_all_gather",
    summary="Joins the parts of all groups of a union; the gradient is cut if duplicate, else reduced.",
    schema=_SCHEMA,
    eager=_gather,
    fake=_fake,
    adjoint=_adjoint_of_gather,
    cost=ring_cost,
    algorithm=algorithm_of_slices(algorithm_of_parts),
).register()
