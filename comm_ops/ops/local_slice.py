"""hetu::local_slice: this rank's part of a tensor that it has whole."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_parts
from hetu_fx.comm_ops.plans.cost import no_cost
from hetu_fx.comm_ops.plans.subdims import check_size, part_shape, take_part
from hetu_fx.comm_ops.wire.collectives import fresh
from hetu_fx.comm_ops.wire.groups import active


def _eager(x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = "") -> Tensor:
    check_size(x, dim, sum(sizes), outer, inner, "local_slice")
    return fresh(take_part(x, dim, sizes, active().position(ranks), outer, inner))


def _fake(x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = "") -> Tensor:
    return x.new_empty(part_shape(x, dim, sizes[active().position(ranks)], outer, inner))


def _adjoint(
    gradient: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = ""
) -> Tensor:
    return call("all_gather", gradient, ranks, dim, sizes, outer, inner, "duplicate", form)


LOCAL_SLICE = CommOp(
    name="local_slice",
    summary="Keeps this rank's part of `dim`; the gradient is gathered.",
    schema='(Tensor x, int[] ranks, int dim, SymInt[] sizes, int outer, int inner, str form="") -> Tensor',
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=no_cost,
    algorithm=algorithm_of_parts,
).register()
