"""Look-ups: the dim that is looked into stays whole, the dims of the indices and all others pass through.

Tables that are looked up row by row (a vocabulary) may be cut in parts: each looks up what it has.

An index operand whose values are positions of rows inside the shard (`Call.pointers`) looks into its own
rows: then the rows pass through too, see `routing`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from hetu_fx.deduction.rules.build import (
    FIRST,
    broadcast,
    broadcast_shape,
    factor_dim,
    fresh_dims,
    names,
    opaque,
    replace_dims,
    rules_for_ops,
)
from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.forms import KEEPS_ZEROS, OnMissingFactor, OpTraits, PartCall, ShardedForm
from hetu_fx.deduction.rules.rule import NOTHING, Dim, Dims, Factoring, Rule
from hetu_fx.deduction.rules.size import Size, integer

aten = torch.ops.aten


def _index_by_tensors(call: Call) -> Factoring:
    """Index some dims by tensors that are broadcast together; the indexed dims stay whole."""
    if any(operand.is_bool for operand in call.operands[1:]):
        return opaque(call)
    dims, rows = fresh_dims(call.operands[0].shape), _PointedRows(call)
    places = _index_places(call)
    shapes = [operand.shape for operand in call.operands[1:]]
    looked = fresh_dims(broadcast_shape(shapes), "i")
    index_dims = tuple(rows.outer(broadcast(shape, looked)) for shape in shapes)
    source = replace_dims(
        dims, {dim: rows.indexed_factor(i, index_dims[i]) for i, dim in places.items() if rows.points(i)}
    )
    plain = [dim for i, dim in places.items() if not rows.points(i)]
    at, rest = _result_place(places), tuple(dim for i, dim in enumerate(source) if i not in places.values())
    result, whole = (*rest[:at], *rows.outer(looked), *rest[at:]), names(dims, plain) | rows.inner
    return Factoring((source, *index_dims), (result,), rows.sizes, whole, FIRST, pinned=rows.inner)


class _PointedRows:
    """The factors of index dims that are positions of rows: (row, slot) if several point at each row."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.sizes: dict[str, Size] = {}
        self.inner: frozenset[str] = NOTHING
        self._composite: dict[Dim, Dim] = {}
        for i, dim in _index_places(call).items():
            if self.points(i):
                self._relate(call.operands[0].shape[dim], call.operands[1 + i].shape)

    def points(self, index: int) -> bool:
        """Tell whether an index operand points at rows of the shard."""
        return 1 + index in self._call.pointers

    def outer(self, dims: Dims) -> Dims:
        """Return index dims with those that point at rows written as (row, slot)."""
        return tuple(self._composite.get(dim, dim) for dim in dims)

    def indexed_factor(self, index: int, dims: Dims) -> Dim:
        """Return the factor of the dim that an index operand points into."""
        return tuple(name for dim in dims for name in dim if name not in self.inner)

    def _relate(self, rows: Size, shape: Shape) -> None:
        width = max(len(operand.shape) for operand in self._call.operands[1:])
        place, size = next((i, s) for i, s in enumerate(shape) if s.number != 1)
        name, slots = f"i{place + width - len(shape)}", size.over(rows)
        if slots is not None and slots != integer(1):
            self.sizes.update({name: rows, "slot": slots})
            self.inner = frozenset({"slot"})
            self._composite[(name,)] = (name, "slot")


def _index_places(call: Call) -> dict[int, int]:
    """Return {index operand (counted without the tensor): dim it indexes}."""
    given = [i for i, index in enumerate(call.arguments["indices"]) if index is not None]
    return dict(enumerate(given))


def _result_place(places: dict[int, int]) -> int:
    """Return where the index dims stand among the dims that are left."""
    dims = list(places.values())
    return dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0


def _write_at_indices(call: Call) -> Factoring:
    """Write values at positions of some dims; these stay whole, unless rows are only permuted; others pass."""
    dims = fresh_dims(call.operands[0].shape)
    if call.pointers and len(dims) == 1:
        return Factoring((dims,) * len(call.operands), (dims,))
    _, *indices, written = call.operands
    if any(index.is_bool for index in indices):
        return opaque(call)
    places = _index_places(call)
    looked = fresh_dims(broadcast_shape([index.shape for index in indices]), "i")
    at, rest = _result_place(places), [dim for i, dim in enumerate(dims) if i not in places.values()]
    index_dims = (broadcast(index.shape, looked) for index in indices)
    values = broadcast(written.shape, (*rest[:at], *looked, *rest[at:]))
    whole = names(dims, [*places.values()]) | names(looked)
    return Factoring((dims, *index_dims, values), (dims,), whole=whole, linear=(frozenset({0, len(indices) + 1}),))


def _table_lookup(call: Call) -> Factoring:
    """Look up rows of a table, which may be cut if gradients are not counted per index or sparse.

    What is scaled by how often an index comes needs all indices.
    """
    dims = fresh_dims(call.operands[1].shape, "i")
    table = tuple(map(factor_dim, "vh", call.operands[0].shape))
    plain = not call.arguments.get("scale_grad_by_freq") and not call.arguments.get("sparse")
    looked = names(table, [0])
    whole, sharded = (NOTHING, looked) if plain else (looked, NOTHING)
    whole |= names(dims) if call.arguments.get("scale_grad_by_freq") else NOTHING
    return Factoring((table, dims), ((*dims, table[1]),), whole=whole, linear=FIRST, sharded=sharded)


def _bagged(call: Call) -> Factoring:
    """Look up bags of rows that begin at given positions; all stays whole, as bags have lengths of their own."""
    return opaque(call)


def _pick_along_dim(call: Call) -> Factoring:
    """Pick along one dim, which may be cut in the tensor; other dims pass through where they are taken in full."""
    if _has_numbers(call):
        return opaque(call)
    shape, index = call.operands[0].shape, call.operands[1].shape
    dim = call.dim()
    dims = fresh_dims(index)
    partly = [i for i in range(len(shape)) if i != dim and shape[i] != index[i]]
    source = replace_dims(dims, {i: factor_dim(f"s{i}", shape[i]) for i in [*partly, dim]})
    whole = names(source, partly) | names(dims, partly)
    return Factoring((source, dims), (dims,), whole=whole, linear=FIRST, sharded=names(source, [dim]))


def _write_along_dim(call: Call) -> Factoring:
    """Write along one dim, which stays whole; other dims pass through where they are written in full."""
    if _has_numbers(call):
        return opaque(call)
    shape, index = call.operands[0].shape, call.operands[1].shape
    dim = call.dim()
    dims = fresh_dims(shape)
    partly = [i for i in range(len(shape)) if i != dim and shape[i] != index[i]]
    written = replace_dims(dims, {i: factor_dim(f"s{i}", index[i]) for i in [*partly, dim]})
    whole = names(dims, [*partly, dim]) | names(written, [*partly, dim])
    full = len(call.operands) < 3 or call.operands[2].shape == index
    last = written if full else fresh_dims(call.operands[-1].shape, "v")
    whole |= NOTHING if full else names(last)
    operands = (dims, written, last)[: len(call.operands)]
    return Factoring(operands, (dims,), whole=whole, linear=(frozenset({0, 2}),) if len(operands) == 3 else ())


def _picked_rows(call: Call) -> Factoring:
    """Pick along one dim, whole in the tensor, by a list of positions, which passes through."""
    dims = fresh_dims(call.operands[0].shape)
    dim = call.dim()
    index = fresh_dims(call.operands[1].shape, "i")
    target = replace_dims(dims, {dim: index[0] if index else ()})
    return Factoring((dims, index), (target,), whole=names(dims, [dim]), linear=FIRST)


def _added_rows(call: Call) -> Factoring:
    """Add rows at a list of positions; positions and the dim stay whole, unless rows are only permuted."""
    if _has_numbers(call):
        return opaque(call)
    shape, source = call.operands[0].shape, call.operands[2].shape
    dim = call.dim()
    dims = fresh_dims(shape)
    slots = source[dim].over(shape[dim])
    if call.pointers and slots is not None:
        inner = factor_dim("slot", slots)
        row = (*dims[dim], *inner)
        sizes = {"slot": slots} | {name: shape[dim] for name in dims[dim]}
        pinned = frozenset(inner)
        return Factoring((dims, (row,), replace_dims(dims, {dim: row})), (dims,), sizes, pinned, pinned=pinned)
    new = factor_dim("new", source[dim])
    whole = names(dims, [dim]) | frozenset(new)
    linear = (frozenset({0, 2}),)
    return Factoring((dims, (new,), replace_dims(dims, {dim: new})), (dims,), whole=whole, linear=linear)


def _written_rows(call: Call, *, linear: bool = False) -> Factoring:
    """Write, or fold in, rows at a list of positions; positions and the dim stay whole."""
    if not call.rank:  # a number
        return opaque(call)
    dims, dim = fresh_dims(call.operands[0].shape), call.dim()
    new = fresh_dims(call.operands[1].shape, "new")
    whole = names(dims, [dim]) | names(new)
    if len(call.operands) < 3 or not call.operands[2].shape:  # the same number everywhere
        others = tuple(() for _ in call.operands[2:])
        return Factoring((dims, new, *others), (dims,), whole=whole)
    written = replace_dims(dims, {dim: new[0] if new else ()})
    return Factoring((dims, new, written), (dims,), whole=whole, linear=(frozenset({0, 2}),) if linear else ())


def _folded_in(call: Call) -> Factoring:
    """Fold values in along one dim, which stays whole; other dims pass through where they are written in full."""
    return replace(_write_along_dim(call), linear=())


def _picked_along(call: Call) -> Factoring:
    """Pick along one dim, whole in the tensor; tensor and positions are broadcast in the others."""
    if call.arguments.get("dim") is None:
        return opaque(call)
    target = fresh_dims(call.results[0])
    dim = call.dim(rank=len(target))
    source, index = (broadcast(operand.shape, target) for operand in call.operands)
    own = factor_dim("s", call.operands[0].shape[dim])
    return Factoring((replace_dims(source, {dim: own}), index), (target,), whole=frozenset(own), linear=FIRST)


def _has_numbers(call: Call) -> bool:
    """Tell whether one of the tensors is a number, whose dims are those of no other."""
    return any(not operand.shape for operand in call.operands)


def one_hot(call: Call) -> Factoring:
    """Write a 1 at each value's place in a new last dim, which stays whole."""
    dims = fresh_dims(call.operands[0].shape)
    new = factor_dim("c", call.results[0][-1])
    return Factoring((dims,), ((*dims, new),), whole=frozenset(new))


def _look_up_own(shard: PartCall) -> fx.Node:
    """Look up the rows that lie in the part; zero elsewhere. The padding row gets no gradient, as without parts."""
    given = shard.given
    place, elsewhere = shard.places(given["indices"])
    padding = given["padding_idx"] - shard.first
    own_padding = padding if 0 <= padding < shard.size else -1
    found = shard.emit(aten.embedding.default, given["weight"], place, own_padding)
    return shard.emit(aten.masked_fill.Scalar, found, shard.emit(aten.unsqueeze.default, elsewhere, -1), 0.0)


def _pick_own(shard: PartCall) -> fx.Node:
    """Pick what lies in the part; zero elsewhere."""
    return shard.pick_rows(shard.given["self"], shard.dim, shard.given["index"])


def _points_along_dim(call: Call) -> list[tuple[int, int, int]]:
    return [(1, 0, call.dim())] if call.rank else []


def _points_into_dims(call: Call) -> list[tuple[int, int, int]]:
    found = _index_places(call).items()
    return [(1 + index, 0, dim) for index, dim in found if not call.operands[1 + index].is_bool]


def _begins_bags(call: Call) -> list[tuple[int, int, int]]:
    return [(2, 1, 0)] if len(call.operands) > 2 else []


_ALONG_DIM, _INTO_DIMS = OpTraits(points=_points_along_dim), OpTraits(points=_points_into_dims)

RULES: tuple[Rule, ...] = (
    *rules_for_ops(
        _table_lookup,
        "embedding",
        traits=OpTraits(sharded=ShardedForm(_look_up_own, OnMissingFactor.SUM), points=_points_along_dim),
    ),
    *rules_for_ops(_bagged, "embedding_bag", "embedding_bag.padding_idx", traits=OpTraits(points=_begins_bags)),
    *rules_for_ops(_index_by_tensors, "index.Tensor", traits=replace(KEEPS_ZEROS, points=_points_into_dims)),
    *rules_for_ops(_index_by_tensors, "_unsafe_index.Tensor", traits=_INTO_DIMS),
    *rules_for_ops(_write_at_indices, "index_put", "_unsafe_index_put", traits=_INTO_DIMS),
    *rules_for_ops(
        _pick_along_dim,
        "gather",
        traits=OpTraits(sharded=ShardedForm(_pick_own, OnMissingFactor.SUM), points=_points_along_dim),
    ),
    *rules_for_ops(_write_along_dim, "scatter.src", "scatter.value", "scatter_add", traits=_ALONG_DIM),
    *rules_for_ops(_picked_rows, "index_select", traits=replace(KEEPS_ZEROS, points=_points_along_dim)),
    *rules_for_ops(_added_rows, "index_add", traits=_ALONG_DIM),
    *rules_for_ops(one_hot, "one_hot"),
    *rules_for_ops(_written_rows, "index_copy", traits=_ALONG_DIM, linear=True),
    *rules_for_ops(_written_rows, "index_fill.int_Scalar", "index_fill.int_Tensor", "index_reduce", traits=_ALONG_DIM),
    *rules_for_ops(_folded_in, "scatter.reduce", "scatter.value_reduce", "scatter_reduce.two", traits=_ALONG_DIM),
    *rules_for_ops(_picked_along, "take_along_dim"),
)
