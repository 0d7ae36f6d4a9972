"""hetu::reduce_scatter: the sum of summands, each rank its part of a dim."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_parts
from hetu_fx.comm_ops.plans.cost import ring_cost
from hetu_fx.comm_ops.plans.subdims import check_size, part_shape, take_part
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.two_level import reduce_scatter_by


def _eager(x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = "") -> Tensor:
    check_size(x, dim, sum(sizes), outer, inner, "reduce_scatter")
    parts = [take_part(x, dim, sizes, position, outer, inner) for position in range(len(ranks))]
    return reduce_scatter_by(parts, ranks, parse_algorithm(form), active())


def _fake(x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = "") -> Tensor:
    return x.new_empty(part_shape(x, dim, sizes[active().position(ranks)], outer, inner))


def _adjoint(
    gradient: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = ""
) -> Tensor:
    return call("all_gather", gradient, ranks, dim, sizes, outer, inner, "duplicate", form)


REDUCE_SCATTER = CommOp(
    name="reduce_scatter",
    summary="Sums over `ranks` and keeps this rank's part of `dim`; the gradient is gathered.",
    schema='(Tensor x, int[] ranks, int dim, SymInt[] sizes, int outer, int inner, str form="") -> Tensor',
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=ring_cost,
    algorithm=algorithm_of_parts,
).register()
