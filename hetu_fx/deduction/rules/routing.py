"""Ops of mixture-of-experts routing: sort rows by expert, count them, multiply group by group, put them back.

Sorting looks across rows, so in general its dim stays whole. Routing is different: each token is sent to
its experts on its own, rows are only put in an order that groups them by expert, and are put back at the
end. There a shard may sort its own rows: the order differs from the single device's, the results after
putting back do not. The order inside a shard is consistent in itself if indices of rows are used only to
index those rows, and if what counts the rows of each expert counts the shard's own (`counted`). `row_order`
proves this use by use over the graph; where it cannot, `Call.routed` is False and the rows stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from torch import fx

from hetu_fx.deduction.rules.build import (
    EACH,
    FIRST,
    change_dims,
    fresh_dims,
    full_name,
    keep_dims,
    names,
    opaque,
    replace_dims,
    rules_for_ops,
)
from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.forms import OnMissingFactor, OpTraits, PartCall, ShardedForm
from hetu_fx.deduction.rules.rule import Dims, Factoring, LiteralSize, Rule
from hetu_fx.deduction.rules.size import Size, integer
from hetu_fx.graph.calls import callee

aten = torch.ops.aten
GROUPED = frozenset({2})


def _sorted_along(call: Call) -> Factoring:
    """Sort along a dim, which stays whole unless its rows are sorted shard by shard."""
    return keep_dims(call, () if call.routed else [call.dim()])


def top(call: Call) -> Factoring:
    """Take the largest of a dim, which stays whole, as does the number taken."""
    return change_dims(call, [call.dim()] if call.rank else [], linear=False)


def histogram(call: Call) -> Factoring:
    """Count values in bins: a sum over all elements if the range is given, else they stay whole."""
    dims, bins = fresh_dims(call.operands[0].shape), fresh_dims(call.results[0], "o")
    fixed = call.arguments.get("min", 0) != call.arguments.get("max", 0)
    return Factoring((dims,), (bins,), whole=names(bins) if fixed else names(bins + dims))


def _grouped_product(call: Call) -> Factoring:
    """Multiply groups of rows by a matrix each; rows pass with the shard's own counts, groups may be cut."""
    ranks = [len(operand.shape) for operand in call.operands]
    if ranks == [3, 3]:
        return _batched(call)
    if ranks != [2, 3, 1]:
        return opaque(call)
    (m, k), (g, _, n) = (fresh_dims(operand.shape, p) for operand, p in zip(call.operands[:2], "xw", strict=True))
    return Factoring(
        ((m, k), (g, k, n), (g,)),
        ((m, n),),
        whole=frozenset() if call.routed else frozenset(m),
        linear=EACH,
        counted=GROUPED,
        sharded=frozenset(g),
    )


def _batched(call: Call) -> Factoring:
    (b, m, k), (_, _, n) = (fresh_dims(operand.shape, p) for operand, p in zip(call.operands, "xw", strict=True))
    return Factoring(((b, m, k), (b, k, n)), ((b, m, n),), linear=EACH)


def _product_of_own_groups(shard: PartCall) -> fx.Node:
    """Multiply the rows of the groups that the part has; zero for all other rows.

    Rows are turned so that the part's first comes first, and turned back; whatever the op does with rows that belong
    to no group comes to nothing, forward and backward.
    """
    rows, matrices, ends, *others = shard.given.values()
    start, own_ends = _groups(shard, ends)
    number = _numbers(shard, rows)
    elsewhere = shard.emit(aten.unsqueeze.default, _outside(shard, number, start, own_ends), 1)
    if start is not None:
        count = shard.emit(aten.select.int, ends, 0, -1)
        turned, back = (
            shard.emit(aten.remainder.Tensor, shard.emit(op, number, start), count)
            for op in (aten.add.Tensor, aten.sub.Tensor)
        )
        own_ends = shard.emit(aten.sub.Tensor, own_ends, start)
    kept = shard.emit(aten.masked_fill.Scalar, rows, elsewhere, 0.0)
    given = kept if start is None else shard.emit(aten.index_select.default, kept, 0, turned)
    product = shard.emit(callee(shard.node), given, matrices, own_ends, *others)
    product = product if start is None else shard.emit(aten.index_select.default, product, 0, back)
    return shard.emit(aten.masked_fill.Scalar, product, elsewhere, 0.0)


def _groups(shard: PartCall, ends: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """Return the first row of the part's groups (None for row 0), and where each of them ends."""
    last = shard.first + shard.size
    start = shard.emit(aten.select.int, ends, 0, shard.first - 1) if shard.first else None
    return start, shard.emit(aten.slice.Tensor, ends, 0, shard.first, last)


def _numbers(shard: PartCall, rows: fx.Node) -> fx.Node:
    """Number the rows from 0, on whatever device they are."""
    ones = shard.emit(aten.ones_like.default, shard.emit(aten.select.int, rows, 1, 0), dtype=torch.int64)
    return shard.emit(aten.sub.Tensor, shard.emit(aten.cumsum.default, ones, 0), 1)


def _outside(shard: PartCall, number: fx.Node, start: fx.Node | None, ends: fx.Node) -> fx.Node:
    after = shard.emit(aten.ge.Tensor, number, shard.emit(aten.select.int, ends, 0, -1))
    if start is None:
        return after
    return shard.emit(aten.logical_or.default, after, shard.emit(aten.lt.Tensor, number, start))


OWN_GROUPS = OpTraits(sharded=ShardedForm(_product_of_own_groups, OnMissingFactor.SPREAD))

ROUTING: tuple[Rule, ...] = (
    *rules_for_ops(_sorted_along, "sort", "sort.stable", "argsort", "argsort.stable"),
    *rules_for_ops(top, "topk"),
    *rules_for_ops(histogram, "histc"),
    *rules_for_ops(_grouped_product, "_grouped_mm", "transformers.grouped_mm_fallback.default", traits=OWN_GROUPS),
    *rules_for_ops(_grouped_product, "*.*grouped_mm_fallback.default"),
)


class Role(Enum):
    """What an op may do to rows that stand in an order of the shard's own, or to positions of rows."""

    SORT = "sort"  # makes an order, and the positions it takes rows from
    COUNT_UP = "count_up"  # makes positions: 0, 1, 2, ...
    COUNT = "count"  # counts rows, in whatever order
    GROUPED = "grouped"  # reads rows in groups, by counts of the same rows
    INDEX = "index"  # takes rows from positions
    PUT = "put"  # writes rows to positions
    ADD_ROWS = "add_rows"  # adds rows to positions
    DIVIDE = "divide"  # makes positions of slots positions of rows
    CARRY = "carry"  # moves or casts values
    ADD_UP = "add_up"  # turns counts into offsets
    ADD = "add"  # moves values if it adds the number 0
    MAKE_LIKE = "make_like"  # reads a shape only
    DRAW = "draw"  # draws by the places at which rows stand


OPS_BY_ROLE = {
    Role.SORT: "sort sort.stable argsort argsort.stable",
    Role.COUNT_UP: "arange arange.start arange.start_step",
    Role.COUNT: "histc",
    Role.DRAW: "hetu.dropout.default hetu.uniform.default",
    Role.ADD_UP: "cumsum",
    Role.GROUPED: "_grouped_mm transformers.grouped_mm_fallback.default",
    Role.INDEX: "index.Tensor _unsafe_index.Tensor",
    Role.PUT: "index_put _unsafe_index_put",
    Role.ADD_ROWS: "index_add",
    Role.DIVIDE: "floor_divide floor_divide.Scalar div.Tensor_mode",
    Role.ADD: "add.Tensor add.Scalar sub.Tensor",
    Role.MAKE_LIKE: "empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full",
    Role.CARRY: """
        clone contiguous detach alias to.dtype to.device to.dtype_layout _to_copy view reshape _unsafe_view
        unsqueeze squeeze.dim expand transpose.int permute slice.Tensor
    """,
}
ROLES: Mapping[str, Role] = {full_name(op): role for role, ops in OPS_BY_ROLE.items() for op in ops.split()}


def _moved(call: Call, source: str, result: str) -> Factoring:
    """Other rows in one dim, which is (outer, rows, inner); those of all replicas are never cut."""
    dim, around = call.integer("dim"), {name: integer(call.integer(name)) for name in ("outer", "inner")}
    sizes = {name: size for name, size in around.items() if size.number != 1}

    def named(shape: Shape, rows: str) -> Dims:
        inside = shape[dim]
        for size in around.values():
            inside = _over(inside, size)
        sizes[rows] = inside
        parts = (name for name in ("outer", rows, "inner") if name in sizes)
        return replace_dims(fresh_dims(shape), {dim: tuple(parts)})

    state, *others = (fresh_dims(operand.shape, f"o{i}_") for i, operand in enumerate(call.operands[1:]))
    given, made = named(call.operands[0].shape, source), named(call.results[0], result)
    literals = tuple(LiteralSize(call.at(name), (name,)) for name in around if name in sizes)
    return Factoring((given, state, *others), (made,), sizes, names(state) | {"all"}, FIRST, literals=literals)


def _over(size: Size, part: Size) -> Size:
    rest = size.over(part)
    assert rest is not None, "a dim that has rows is a product"
    return rest


REPLICA_ROWS: tuple[Rule, ...] = (
    *rules_for_ops(opaque, "_local_scalar_dense", "hetu.leaf.default"),
    *rules_for_ops(_moved, "hetu.place_rows.default", source="rows", result="all"),
    *rules_for_ops(_moved, "hetu.own_rows.default", source="all", result="rows"),
)

RULES: tuple[Rule, ...] = (*ROUTING, *REPLICA_ROWS)
