"""The ops between a tensor that ranks have whole and its parts along a dim: all_gather, reduce_scatter, local_slice.

The middle factor of the dim, viewed as (outer, middle, inner), is cut in `sizes`.
"""

from __future__ import annotations

from torch import Tensor

from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_parts
from hetu_fx.comm_ops.plans.cost import no_cost, ring_cost
from hetu_fx.comm_ops.plans.subdims import check_size, join_parts, part_shape, take_part
from hetu_fx.comm_ops.wire.collectives import fresh
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.two_level import all_gather_by, reduce_scatter_by

_LAYOUT = "int[] ranks, int dim, SymInt[] sizes, int outer, int inner"


def _gather(
    x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, cotangent: str, form: str = ""
) -> Tensor:
    table = active()
    check_size(x, dim, sizes[table.position(ranks)], outer, inner, "all_gather")
    shapes = [part_shape(x, dim, size, outer, inner) for size in sizes]
    parts = all_gather_by(x, shapes, ranks, parse_algorithm(form), table)
    return fresh(parts[0]) if len(parts) == 1 else join_parts(parts, dim, outer)


def _fake_whole(
    x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, cotangent: str, form: str = ""
) -> Tensor:
    return x.new_empty(part_shape(x, dim, sum(sizes), outer, inner))


def _adjoint_of_gather(
    gradient: Tensor,
    ranks: list[int],
    dim: int,
    sizes: list[int],
    outer: int,
    inner: int,
    cotangent: str,
    form: str = "",
) -> Tensor:
    op = "local_slice" if cotangent == "duplicate" else "reduce_scatter"
    return call(op, gradient, ranks, dim, sizes, outer, inner, form)


def _reduce(x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = "") -> Tensor:
    check_size(x, dim, sum(sizes), outer, inner, "reduce_scatter")
    parts = [take_part(x, dim, sizes, position, outer, inner) for position in range(len(ranks))]
    return reduce_scatter_by(parts, ranks, parse_algorithm(form), active())


def _slice(x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = "") -> Tensor:
    check_size(x, dim, sum(sizes), outer, inner, "local_slice")
    return fresh(take_part(x, dim, sizes, active().position(ranks), outer, inner))


def _fake_part(
    x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = ""
) -> Tensor:
    return x.new_empty(part_shape(x, dim, sizes[active().position(ranks)], outer, inner))


def _gathered(
    gradient: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = ""
) -> Tensor:
    return call("all_gather", gradient, ranks, dim, sizes, outer, inner, "duplicate", form)


ALL_GATHER = CommOp(
    name="all_gather",
    summary="Joins parts of `dim` from `ranks`. The gradient is cut if duplicate there, reduced if partial.",
    schema=f'(Tensor x, {_LAYOUT}, str cotangent, str form="") -> Tensor',
    eager=_gather,
    fake=_fake_whole,
    adjoint=_adjoint_of_gather,
    cost=ring_cost,
    algorithm=algorithm_of_parts,
).register()

REDUCE_SCATTER = CommOp(
    name="reduce_scatter",
    summary="Sums over `ranks` and keeps this rank's part of `dim`; the gradient is gathered.",
    schema=f'(Tensor x, {_LAYOUT}, str form="") -> Tensor',
    eager=_reduce,
    fake=_fake_part,
    adjoint=_gathered,
    cost=ring_cost,
    algorithm=algorithm_of_parts,
).register()

LOCAL_SLICE = CommOp(
    name="local_slice",
    summary="Keeps this rank's part of `dim`; the gradient is gathered.",
    schema=f'(Tensor x, {_LAYOUT}, str form="") -> Tensor',
    eager=_slice,
    fake=_fake_part,
    adjoint=_gathered,
    cost=no_cost,
    algorithm=algorithm_of_parts,
).register()
