"""Communication: the ops of one tensor that are collectives, and the table of all ops.

Between summands and their sum: all_reduce (Megatron's g) and, in the backward alone, identity (its f). Between a tensor
that ranks have whole and its parts along a dim: all_gather, reduce_scatter and local_slice; all_to_all between parts
along two dims, and repartition between parts along one of other sizes. Across unequal groups, slice by slice:
split_all_reduce, split_reduce_scatter and split_all_gather.

`OPS` is the table of records, by name; importing it registers them all with torch as `hetu::name`. Those of one tensor,
which the resolver picks from, are `COMM_OPS`; the others compute while they communicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation, cotangent
from hetu_fx.annotations.states import Partial
from hetu_fx.comm_ops.ops.batched_send_receive import BATCHED_SEND_RECEIVE
from hetu_fx.comm_ops.ops.op import CommOp, FusedOp, call
from hetu_fx.comm_ops.ops.overlapped_products import GATHERED_PRODUCTS, GATHERED_PRODUCTS_BACKWARD, SUMMED_PRODUCT
from hetu_fx.comm_ops.ops.product_from_factors import PRODUCT_FROM_FACTORS, PRODUCT_FROM_FACTORS_BACKWARD
from hetu_fx.comm_ops.ops.ring_attention import RING_ATTENTION, RING_ATTENTION_BACKWARD
from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import algorithm_of_parts, algorithm_of_sums, always_flat
from hetu_fx.comm_ops.plans.cost import all_reduce_cost, no_cost, ring_cost
from hetu_fx.comm_ops.plans.transition import Transition, parse_transition
from hetu_fx.comm_ops.wire.algorithms import Collectives
from hetu_fx.comm_ops.wire.bsr_run import (
    algorithm_of_slices,
    gather_slices,
    reduce_slices,
    result_like,
    scatter_slices,
)
from hetu_fx.comm_ops.wire.collectives import FlatCollectives, fresh
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.errors import CommError

# Summands and their sum.


def _collectives(ranks: Sequence[int], form: str) -> Collectives:
    return Collectives(ranks, parse_algorithm(form), active(), is_async=False)


def _exchanged(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]) -> list[Tensor]:
    return FlatCollectives(ranks, active(), is_async=False).exchange(parts, shapes).wait()


def _sum(x: Tensor, ranks: list[int], cotangent: str, form: str = "") -> Tensor:
    return _collectives(ranks, form).sum(x).wait()


def _adjoint_of_sum(gradient: Tensor, ranks: list[int], cotangent: str, form: str = "") -> Tensor:
    if cotangent == "duplicate":
        return gradient
    return call("all_reduce", gradient, ranks, cotangent, form)


def _keep(x: Tensor, ranks: list[int], form: str = "") -> Tensor:
    return fresh(x)


def _adjoint_of_keep(gradient: Tensor, ranks: list[int], form: str = "") -> Tensor:
    return call("all_reduce", gradient, ranks, "duplicate", form)


def _fake_alike(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


# A tensor and its parts: the middle factor of a dim, viewed as (outer, middle, inner), is cut in `sizes`.

_CUT = "int[] ranks, int dim, SymInt[] sizes, int outer, int inner"


def _gather(
    x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, cotangent: str, form: str = ""
) -> Tensor:
    table = active()
    _check_size(x, dim, sizes[table.position(ranks)], outer, inner, "all_gather")
    shapes = [_part_shape(x, dim, size, outer, inner) for size in sizes]
    parts = _collectives(ranks, form).gather(x, shapes).wait()
    return fresh(parts[0]) if len(parts) == 1 else join_parts(parts, dim, outer)


def _fake_whole(x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, *_: object) -> Tensor:
    return x.new_empty(_part_shape(x, dim, sum(sizes), outer, inner))


def _adjoint_of_gather(gradient: Tensor, *args: Any) -> Tensor:
    *cut, cotangent = args[:6]
    return call("local_slice" if cotangent == "duplicate" else "reduce_scatter", gradient, *cut, *args[6:])


def _reduce(x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = "") -> Tensor:
    _check_size(x, dim, sum(sizes), outer, inner, "reduce_scatter")
    parts = [take_part(x, dim, sizes, position, outer, inner) for position in range(len(ranks))]
    return _collectives(ranks, form).scatter(parts).wait()


def _slice(x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, form: str = "") -> Tensor:
    _check_size(x, dim, sum(sizes), outer, inner, "local_slice")
    return fresh(take_part(x, dim, sizes, active().position(ranks), outer, inner))


def _fake_part(x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, *_: object) -> Tensor:
    return x.new_empty(_part_shape(x, dim, sizes[active().position(ranks)], outer, inner))


def _gathered(gradient: Tensor, *args: Any) -> Tensor:
    return call("all_gather", gradient, *args[:5], "duplicate", *args[5:])


def _exchange(
    x: Tensor,
    ranks: list[int],
    dim: int,
    sizes: list[int],
    outer: int,
    inner: int,
    joined: int,
    parts: list[int],
    before: int,
    after: int,
    form: str = "",
) -> Tensor:
    table = active()
    here = table.position(ranks)
    _check_size(x, dim, sum(sizes), outer, inner, "all_to_all")
    _check_size(x, joined, parts[here], before, after, "all_to_all")
    leaving = [take_part(x, dim, sizes, position, outer, inner) for position in range(len(ranks))]
    shapes = [_part_shape(leaving[here], joined, size, before, after) for size in parts]
    return fresh(join_parts(_exchanged(leaving, shapes, ranks), joined, before))


def _fake_exchanged(
    x: Tensor,
    ranks: list[int],
    dim: int,
    sizes: list[int],
    outer: int,
    inner: int,
    joined: int,
    parts: list[int],
    before: int,
    after: int,
    *_: object,
) -> Tensor:
    part = x.new_empty(_part_shape(x, dim, sizes[active().position(ranks)], outer, inner))
    return part.new_empty(_part_shape(part, joined, sum(parts), before, after))


def _adjoint_of_exchange(gradient: Tensor, ranks: list[int], *args: Any) -> Tensor:
    return call("all_to_all", gradient, ranks, *args[4:8], *args[:4], *args[8:])


def _repartition(
    x: Tensor,
    ranks: list[int],
    dim: int,
    sizes: list[int],
    outer: int,
    inner: int,
    parts: list[int],
    form: str = "",
) -> Tensor:
    table = active()
    here = table.position(ranks)
    _check_size(x, dim, sizes[here], outer, inner, "repartition")
    if sum(sizes) != sum(parts):
        raise CommError(f"repartition cuts dim {dim} in parts {parts}, which add up to other than its {sizes}")
    kept, asked = _bounds(sizes), _bounds(parts)
    start, _ = kept[here]
    leaving = [_taken(x, dim, max(a, start) - start, _overlap(kept[here], (a, b)), outer, inner) for a, b in asked]
    shapes = [_part_shape(x, dim, _overlap(each, asked[here]), outer, inner) for each in kept]
    return fresh(join_parts(_exchanged(leaving, shapes, ranks), dim, outer))


def _fake_repartitioned(
    x: Tensor, ranks: list[int], dim: int, sizes: list[int], outer: int, inner: int, parts: list[int], *_: object
) -> Tensor:
    return x.new_empty(_part_shape(x, dim, parts[active().position(ranks)], outer, inner))


def _adjoint_of_repartition(gradient: Tensor, ranks: list[int], dim: int, sizes: list[int], *args: Any) -> Tensor:
    outer, inner, parts, *form = args
    return call("repartition", gradient, ranks, dim, parts, outer, inner, sizes, *form)


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(sizes, initial=0)))


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def take_part(x: Tensor, dim: int, sizes: Sequence[int], position: int, outer: int, inner: int) -> Tensor:
    """View or copy the part of `x` that `position` holds of a cut in `sizes`."""
    return _taken(x, dim, sum(sizes[:position]), sizes[position], outer, inner)


def _taken(x: Tensor, dim: int, start: int, size: int, outer: int, inner: int) -> Tensor:
    """View or copy `size` of the dim's middle from `start`; nothing from anywhere."""
    start = start if size else 0
    if outer == 1:
        return x.narrow(dim, start * inner, size * inner)
    blocks = _blocks(x, dim, outer).narrow(dim + 1, start * inner, size * inner)
    return blocks.reshape(_part_shape(x, dim, size, outer, inner))


def join_parts(parts: Sequence[Tensor], dim: int, outer: int) -> Tensor:
    """Join the parts of all positions; the inverse of `take_part`."""
    if outer == 1:
        return torch.cat(list(parts), dim)
    return torch.cat([_blocks(part, dim, outer) for part in parts], dim + 1).flatten(dim, dim + 1)


def _blocks(x: Tensor, dim: int, outer: int) -> Tensor:
    shape = list(x.shape)
    return x.reshape([*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]])


def _part_shape(x: Tensor, dim: int, size: int, outer: int, inner: int) -> list[int]:
    """Return the shape of `x` with `dim` of size outer * size * inner."""
    shape = list(x.shape)
    shape[dim] = outer * size * inner
    return shape


def _check_size(x: Tensor, dim: int, size: int, outer: int, inner: int, what: str) -> None:
    """Raise CommError where `dim` of `x` is not outer * size * inner long."""
    if x.shape[dim] != outer * size * inner:
        raise CommError(
            f"{what} expects dim {dim} of size {outer * size * inner} (outer {outer}, middle {size}, "
            f"inner {inner}), got a tensor of shape {tuple(x.shape)}"
        )


# Slices of a tensor that unequal groups cut in their own ways.


def _fake_of_change(x: Tensor, change: str, *_: object) -> Tensor:
    return result_like(x, parse_transition(change), active().rank)


def _reduce_slices(x: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return reduce_slices(x, parse_transition(change), parse_algorithm(form), active())


def _adjoint_of_slice_reduce(gradient: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return gradient if cotangent == "duplicate" else call("split_all_reduce", gradient, change, cotangent, form)


def _gather_slices(x: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    return gather_slices(x, parse_transition(change), parse_algorithm(form), active())


def _adjoint_of_slice_gather(gradient: Tensor, change: str, cotangent: str, form: str = "") -> Tensor:
    parsed = parse_transition(change)
    source, target, shape = parsed.source, parsed.target, parsed.shape
    if cotangent == "partial":
        target = Annotation(target.groups, target.shardings, Partial(len(target.groups)))
        return call("split_reduce_scatter", gradient, str(Transition(target, source, shape)), form)
    return call("batched_send_receive", gradient, str(Transition(target, source, shape)), "", form)


def _scatter_slices(x: Tensor, change: str, form: str = "") -> Tensor:
    return scatter_slices(x, parse_transition(change), parse_algorithm(form), active())


def _adjoint_of_slice_scatter(gradient: Tensor, change: str, form: str = "") -> Tensor:
    parsed = parse_transition(change)
    back = Transition(parsed.target, cotangent(parsed.source), parsed.shape)
    return call("split_all_gather", gradient, str(back), "duplicate", form)


_MOVING = (
    CommOp(
        name="identity",
        summary="Keeps a replicated tensor; its gradient, partial on `ranks`, is summed.",
        schema='(Tensor x, int[] ranks, str form="") -> Tensor',
        eager=_keep,
        fake=_fake_alike,
        adjoint=_adjoint_of_keep,
        cost=no_cost,
        algorithm=algorithm_of_sums,
    ),
    CommOp(
        name="all_reduce",
        summary="Sums over `ranks`. The gradient passes if it is a duplicate there, and is summed if partial.",
        schema='(Tensor x, int[] ranks, str cotangent, str form="") -> Tensor',
        eager=_sum,
        fake=_fake_alike,
        adjoint=_adjoint_of_sum,
        cost=all_reduce_cost,
        algorithm=algorithm_of_sums,
    ),
    CommOp(
        name="all_gather",
        summary="Joins parts of `dim` from `ranks`. The gradient is cut if duplicate there, reduced if partial.",
        schema=f'(Tensor x, {_CUT}, str cotangent, str form="") -> Tensor',
        eager=_gather,
        fake=_fake_whole,
        adjoint=_adjoint_of_gather,
        cost=ring_cost,
        algorithm=algorithm_of_parts,
    ),
    CommOp(
        name="reduce_scatter",
        summary="Sums over `ranks` and keeps this rank's part of `dim`; the gradient is gathered.",
        schema=f'(Tensor x, {_CUT}, str form="") -> Tensor',
        eager=_reduce,
        fake=_fake_part,
        adjoint=_gathered,
        cost=ring_cost,
        algorithm=algorithm_of_parts,
    ),
    CommOp(
        name="local_slice",
        summary="Keeps this rank's part of `dim`; the gradient is gathered.",
        schema=f'(Tensor x, {_CUT}, str form="") -> Tensor',
        eager=_slice,
        fake=_fake_part,
        adjoint=_gathered,
        cost=no_cost,
        algorithm=algorithm_of_parts,
    ),
    CommOp(
        name="all_to_all",
        summary="Cuts `dim` and joins another one that was cut; the gradient goes the other way.",
        schema=f'(Tensor x, {_CUT}, int joined, SymInt[] parts, int before, int after, str form="") -> Tensor',
        eager=_exchange,
        fake=_fake_exchanged,
        adjoint=_adjoint_of_exchange,
        cost=ring_cost,
        algorithm=always_flat,
    ),
    CommOp(
        name="repartition",
        summary="Cuts `dim` in parts of other sizes: each rank gets what it lacks of its own; the gradient goes back.",
        schema=f'(Tensor x, {_CUT}, SymInt[] parts, str form="") -> Tensor',
        eager=_repartition,
        fake=_fake_repartitioned,
        adjoint=_adjoint_of_repartition,
        cost=ring_cost,
        algorithm=always_flat,
    ),
    CommOp(
        name="split_all_reduce",
        summary="Sums over the groups of a union. The gradient passes if duplicate over them, else is summed.",
        schema='(Tensor x, str change, str cotangent, str form="") -> Tensor',
        eager=_reduce_slices,
        fake=_fake_of_change,
        adjoint=_adjoint_of_slice_reduce,
        cost=all_reduce_cost,
        algorithm=algorithm_of_slices(algorithm_of_sums),
    ),
    CommOp(
        name="split_all_gather",
        summary="Joins the parts of all groups of a union; the gradient is cut if duplicate, else reduced.",
        schema='(Tensor x, str change, str cotangent, str form="") -> Tensor',
        eager=_gather_slices,
        fake=_fake_of_change,
        adjoint=_adjoint_of_slice_gather,
        cost=ring_cost,
        algorithm=algorithm_of_slices(algorithm_of_parts),
    ),
    CommOp(
        name="split_reduce_scatter",
        summary="Sums over the groups of a union and keeps the group's part; the gradient is gathered.",
        schema='(Tensor x, str change, str form="") -> Tensor',
        eager=_scatter_slices,
        fake=_fake_of_change,
        adjoint=_adjoint_of_slice_scatter,
        cost=ring_cost,
        algorithm=algorithm_of_slices(algorithm_of_parts),
    ),
)
COMM_OPS: Mapping[str, CommOp] = {
    **{record.name: record.register() for record in _MOVING},
    BATCHED_SEND_RECEIVE.name: BATCHED_SEND_RECEIVE,
}
_FUSED = (
    RING_ATTENTION,
    RING_ATTENTION_BACKWARD,
    PRODUCT_FROM_FACTORS,
    PRODUCT_FROM_FACTORS_BACKWARD,
    GATHERED_PRODUCTS,
    GATHERED_PRODUCTS_BACKWARD,
    SUMMED_PRODUCT,
)
FUSED_OPS: Mapping[str, FusedOp] = {record.name: record for record in _FUSED}
OPS: Mapping[str, CommOp | FusedOp] = {**COMM_OPS, **FUSED_OPS}
