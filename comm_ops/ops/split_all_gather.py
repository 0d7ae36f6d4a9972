"""hetu::split_all_gather: the parts of unequal groups, put together in every group."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.states import Partial
from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_parts
from hetu_fx.comm_ops.plans.cost import ring_cost
from hetu_fx.comm_ops.plans.transition import Transition, parse_transition
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.split_run import algorithm_of_slices, gather_slices, result_like


def _eager(x: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return gather_slices(x, parse_transition(change), parse_algorithm(form), active())


def _fake(x: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return result_like(x, parse_transition(change), active().rank)


def _adjoint(gradient: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    parsed = parse_transition(change)
    source, target, shape = parsed.source, parsed.target, parsed.shape
    if cotangent == "partial":
        target = Annotation(target.groups, target.shardings, Partial(len(target.groups)))
        return call("split_reduce_scatter", gradient, str(Transition(target, source, shape)), form)
    return call("batched_send_receive", gradient, str(Transition(target, source, shape)), "", form)


SPLIT_ALL_GATHER = CommOp(
    name="split_all_gather",
    summary="Joins the parts of all groups of a union; the gradient is cut if duplicate, else reduced.",
    schema='(Tensor x, str change, str cotangent, str form="") -> Tensor',
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=ring_cost,
    algorithm=algorithm_of_slices(algorithm_of_parts),
).register()
