"""hetu::all_gather: the parts of a split dim, put together on every rank."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_parts
from hetu_fx.comm_ops.plans.cost import ring_cost
from hetu_fx.comm_ops.plans.subdims import check_size, join_parts, part_shape
from hetu_fx.comm_ops.wire.collectives import fresh
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.two_level import all_gather_by


def _eager(
    x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, cotangent: str, form: str = ""
) -> Tensor:
    table = active()
    check_size(x, dim, sizes[table.position(ranks)], outer, inner, "all_gather")
    shapes = [part_shape(x, dim, size, outer, inner) for size in sizes]
    parts = all_gather_by(x, shapes, ranks, parse_algorithm(form), table)
    return fresh(parts[0]) if len(parts) == 1 else join_parts(parts, dim, outer)


def _fake(
    x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, cotangent: str, form: str = ""
) -> Tensor:
    return x.new_empty(part_shape(x, dim, sum(sizes), outer, inner))


def _adjoint(
    gradient: Tensor,
    ranks: list[int],
    dim: int,
    sizes: list[int],
    outer: int,
    inner: int,
    cotangent: str,
    form: str = "",
) -> Tensor:
    if cotangent == "duplicate":
        return call("local_slice", gradient, ranks, dim, sizes, outer, inner, form)
    return call("reduce_scatter", gradient, ranks, dim, sizes, outer, inner, form)


ALL_GATHER = CommOp(
    name="all_gather",
    summary="Joins parts of `dim` from `ranks`. The gradient is cut if duplicate there, reduced if partial.",
    schema="(Tensor x, int[] ranks, int dim, SymInt[] sizes, int outer, int inner, str cotangent, "
    'str form="") -> Tensor',
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=ring_cost,
    algorithm=algorithm_of_parts,
).register()
