"""Ops that cut dims or put them together: the dim in question stays whole, all others pass; all are linear.

Cutting a dim into equal pieces refines it instead: (pieces, rest), and the rest passes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetu_fx.deduction.rules.build import (
    FIRST,
    built,
    changed,
    dims_of,
    kept,
    kept_along,
    named,
    names,
    opaque,
    replaced,
)
from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.forms import KEEPS_ZEROS
from hetu_fx.deduction.rules.reduction import reduced
from hetu_fx.deduction.rules.rule import Dim, Dims, Factoring, LiteralSize, Rule, names_in
from hetu_fx.deduction.rules.size import integer


def sliced(call: Call) -> Factoring:
    """Take a range of a dim, which stays whole unless all of it is taken."""
    return _cut(call, (call.dim(),))


def _cut(call: Call, dims: Sequence[int]) -> Factoring:
    """Return the factoring of an op that changes the sizes of some dims: there both sides stay whole."""
    shape, result = call.operands[0].shape, call.results[0]
    return changed(call, [dim for dim in dims if shape[dim] != result[dim]])


def pieces(call: Call, *, along: int | None = None) -> Factoring:
    """Cut a dim into pieces: equal ones refine it into (pieces, rest) and the rest passes; unequal ones keep
    it whole."""
    dim = call.dim() if along is None else min(along, call.rank - 1)
    sizes = [result[dim] for result in call.results]
    source = dims_of(call.operands[0].shape)
    if len(sizes) == 1:
        return Factoring((source,), (source,), linear=FIRST, literals=_piece_sizes(call, source[dim], 1))
    if any(size != sizes[0] for size in sizes):
        return _unequal_pieces(call, source, dim)
    count, rest = ("pieces",), named("rest", sizes[0])
    known = {"pieces": integer(len(sizes)), "rest": sizes[0]}
    operand, piece = replaced(source, {dim: (*count, *rest)}), replaced(source, {dim: rest})
    found = _piece_sizes(call, rest, len(sizes))
    return Factoring((operand,), (piece,) * len(sizes), known, frozenset(count), FIRST, literals=found)


def _pieces_at(call: Call, *, along: int | None = None) -> Factoring:
    """Cut a dim at given places; it stays whole."""
    dim = call.dim() if along is None else min(along, call.rank - 1)
    return _unequal_pieces(call, dims_of(call.operands[0].shape), dim)


def _unequal_pieces(call: Call, source: Dims, dim: int) -> Factoring:
    new = [replaced(source, {dim: named(f"piece{i}", shape[dim])}) for i, shape in enumerate(call.results)]
    whole = names(source, [dim]).union(*(names(piece, [dim]) for piece in new))
    return Factoring((source,), tuple(new), whole=whole, linear=FIRST)


def _piece_sizes(call: Call, rest: Dim, count: int) -> tuple[LiteralSize, ...]:
    for argument in ("split_sizes", "split_size"):
        given = call.arguments.get(argument)
        if isinstance(given, list | tuple):
            return tuple(LiteralSize(call.at(argument, i), rest) for i in range(count) if rest)
        if given is not None and rest:
            return (LiteralSize(call.at(argument), rest),)
    return ()


def concatenated(call: Call, *, along: int | None = None) -> Factoring:
    """Join tensors along a dim, which stays whole; empty tensors of one dim count for nothing."""
    result = call.results[0]
    dim = call.dim(rank=len(result)) if along is None else along
    filled = [i for i, operand in enumerate(call.operands) if not _is_legacy_empty(operand.shape, result)]
    target = dims_of(result)
    operands = [dims_of(operand.shape, f"e{i}_") for i, operand in enumerate(call.operands)]
    alone = len(filled) == 1
    for i in filled:
        own = named(f"p{i}", call.operands[i].shape[dim])
        operands[i] = target if alone else replaced(target, {dim: own})
    whole = names_in(dims for i, dims in enumerate(operands) if i not in filled)
    joined = frozenset() if alone else names(target, [dim]).union(*(names(operands[i], [dim]) for i in filled))
    return Factoring(tuple(operands), (target,), whole=whole | joined, linear=(frozenset(range(len(operands))),))


def _put_beside(call: Call, *, along: int) -> Factoring:
    """Join tensors along a dim of a given place, which stays whole; those of fewer dims get some first."""
    ranks = {len(operand.shape) for operand in call.operands}
    return concatenated(call, along=along) if ranks == {len(call.results[0])} and min(ranks) > along else opaque(call)


def differences(call: Call) -> Factoring:
    """Subtract neighbours along a dim, which stays whole in the operand and in what is put before and after it."""
    target = dims_of(call.results[0])
    dim = call.dim(rank=len(target))
    ends = [named(f"p{i}", operand.shape[dim]) for i, operand in enumerate(call.operands)]
    operands = tuple(replaced(target, {dim: end}) for end in ends)
    whole = names(target, [dim]).union(*(names(dims, [dim]) for dims in operands))
    return Factoring(operands, (target,), whole=whole, linear=(frozenset(range(len(operands))),))


def _is_legacy_empty(shape: Shape, result: Shape) -> bool:
    return len(shape) == 1 and shape[0].number == 0 and len(result) > 1


def overwritten(call: Call) -> Factoring:
    """Write a tensor into a range or an index of a dim, which stays whole."""
    dims, dim, shape = dims_of(call.operands[0].shape), call.dim(), call.operands[1].shape
    if shape == call.operands[0].shape:
        return Factoring((dims, dims), (dims,), linear=(frozenset({0, 1}),))
    own = dims_of(shape, "o")[dim : dim + 1] if len(shape) == call.rank else ()
    written = (*dims[:dim], *own, *dims[dim + 1 :])
    whole = names(dims, [dim]) | names(own)
    return Factoring((dims, written), (dims,), whole=whole, linear=(frozenset({0, 1}),))


def stacked(call: Call) -> Factoring:
    """Stack tensors along a new dim, which stays whole."""
    result = dims_of(call.results[0])
    dim = call.dim(rank=len(result))
    operand = result[:dim] + result[dim + 1 :]
    count = len(call.operands)
    return Factoring((operand,) * count, (result,), whole=names(result, [dim]), linear=(frozenset(range(count)),))


def padded(call: Call) -> Factoring:
    """Pad dims at their ends; the padded ones stay whole. Linear if zeros are written."""
    given = call.arguments["pad"]
    dims = [call.rank - 1 - i // 2 for i in range(0, len(given), 2) if given[i] != 0 or given[i + 1] != 0]
    factoring = _cut(call, dims)
    zeros = call.arguments.get("mode", "constant") != "constant" or not call.arguments.get("value")
    whole = factoring.whole | names(factoring.operands[0], dims)
    return replace(factoring, whole=whole, linear=FIRST if zeros else ())


def _unfolded(call: Call) -> Factoring:
    """Take windows of a dim, which stays whole, as do their number and size."""
    factoring, window = changed(call, [call.dim("dimension")]), named("window", call.results[0][-1])
    return replace(factoring, results=((*factoring.results[0], window),), whole=factoring.whole.union(window))


def _turned(call: Call) -> Factoring:
    """Turn two dims by right angles; both stay whole."""
    return changed(call, call.dims("dims"))


def _on_diagonal(call: Call) -> Factoring:
    """Write the last dim on the diagonal of two new ones, all of which stay whole."""
    source, made = dims_of(call.operands[0].shape), dims_of(call.results[0], "o")
    pair = [call.dim(name, rank=len(made)) for name in ("dim1", "dim2")]
    rest = iter(source[:-1])
    target = tuple(dims if i in pair else next(rest) for i, dims in enumerate(made))
    return Factoring((source,), (target,), whole=names(source[-1:]) | names(target, pair), linear=FIRST)


def diagonal(call: Call) -> Factoring:
    """Take the diagonal of two dims, which stay whole, as does the result's last."""
    dims, pair = dims_of(call.operands[0].shape), [call.dim("dim1"), call.dim("dim2")]
    last = named("diagonal", call.results[0][-1])
    target = (*(dim for i, dim in enumerate(dims) if i not in pair), last)
    return Factoring((dims,), (target,), whole=names(dims, pair) | frozenset(last), linear=FIRST)


def _diagonal_written(call: Call) -> Factoring:
    """Write a tensor on the diagonal of two dims, which stay whole, as does its last one."""
    dims, pair = dims_of(call.operands[0].shape), [call.dim("dim1"), call.dim("dim2")]
    last = named("diagonal", call.operands[1].shape[-1])
    written = (*(dim for i, dim in enumerate(dims) if i not in pair), last)
    whole = names(dims, pair) | frozenset(last)
    return Factoring((dims, written), (dims,), whole=whole, linear=(frozenset({0, 1}),))


RULES: tuple[Rule, ...] = (
    *built(sliced, "slice.Tensor", "narrow", traits=KEEPS_ZEROS),
    *built(reduced, "select.int", "unbind.int", traits=KEEPS_ZEROS, linear=True, whole=True),
    *built(pieces, "split.Tensor", "split_with_sizes", "chunk", traits=KEEPS_ZEROS),
    *built(pieces, "split.sizes", "tensor_split.sections"),
    *built(concatenated, "cat", "concat", "concatenate"),
    *built(differences, "diff"),
    *built(overwritten, "slice_scatter", "select_scatter"),
    *built(stacked, "stack"),
    *built(padded, "pad", "constant_pad_nd"),
    *built(kept_along, "flip", "roll", argument="dims", linear=True),
    *built(kept, "tril", "triu", whole=(-2, -1), linear=True),
    *built(_unfolded, "unfold"),
    *built(diagonal, "diagonal", "linalg_diagonal"),
    *built(_on_diagonal, "diag_embed"),
    *built(_diagonal_written, "diagonal_scatter"),
    *built(kept, "fliplr", whole=(1,), linear=True),
    *built(kept, "flipud", whole=(0,), linear=True),
    *built(_turned, "rot90"),
    *built(pieces, "unsafe_split.Tensor", "unsafe_split_with_sizes", "unsafe_chunk"),
    *built(pieces, "hsplit.int", along=1),
    *built(pieces, "vsplit.int", along=0),
    *built(pieces, "dsplit.int", along=2),
    *built(_pieces_at, "tensor_split.indices"),
    *built(_pieces_at, "hsplit.array", along=1),
    *built(_pieces_at, "vsplit.array", along=0),
    *built(_pieces_at, "dsplit.array", along=2),
    *built(_put_beside, "vstack", along=0),
    *built(_put_beside, "hstack", "column_stack", along=1),
    *built(_put_beside, "dstack", along=2),
)
