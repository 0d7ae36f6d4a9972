"""Ops that cut dims or put them together: the dim in question stays whole, all others pass; all are linear.

Cutting a dim into equal pieces refines it instead: (pieces, rest), and the rest passes through.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetu_fx.deduction.rules.build import FIRST, built, dims_of, kept, names, replaced
from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.forms import KEEPS_ZEROS
from hetu_fx.deduction.rules.rule import Dim, Dims, Factoring, LiteralSize, Rule
from hetu_fx.deduction.rules.size import integer


def sliced(call: Call) -> Factoring:
    """Take a range of a dim, which stays whole unless all of it is taken."""
    rank = len(call.operands[0].shape)
    return _cut(call, (call.dim("dim", rank),))


def _cut(call: Call, dims: Sequence[int]) -> Factoring:
    """Return the factoring of an op that changes the sizes of some dims: there both sides stay whole."""
    shape, result = call.operands[0].shape, call.results[0]
    changed = [dim for dim in dims if shape[dim] != result[dim]]
    source, new = dims_of(shape), dims_of(result, "o")
    target = replaced(source, {dim: new[dim] for dim in changed})
    whole = names(source, changed) | names(new, changed)
    return Factoring((source,), (target,), whole=whole, linear=FIRST)


def _selected(call: Call) -> Factoring:
    """Take one index of a dim, which stays whole and is gone."""
    dims = dims_of(call.operands[0].shape)
    dim = call.dim("dim", len(dims))
    return Factoring((dims,), (dims[:dim] + dims[dim + 1 :],), whole=names(dims, [dim]), linear=FIRST)


def _unbound(call: Call) -> Factoring:
    """Take every index of a dim as a tensor of its own; the dim stays whole and is gone."""
    dims = dims_of(call.operands[0].shape)
    dim = call.dim("dim", len(dims))
    piece = dims[:dim] + dims[dim + 1 :]
    return Factoring((dims,), (piece,) * len(call.results), whole=names(dims, [dim]), linear=FIRST)


def pieces(call: Call) -> Factoring:
    """Cut a dim into pieces: equal ones refine it into (pieces, rest) and the rest passes; unequal ones keep
    it whole."""
    shape = call.operands[0].shape
    dim = call.dim("dim", len(shape))
    sizes = [result[dim] for result in call.results]
    source = dims_of(shape)
    if len(sizes) == 1:
        return Factoring((source,), (source,), linear=FIRST, literals=_piece_sizes(call, source[dim], 1))
    if any(size != sizes[0] for size in sizes):
        return _unequal_pieces(call, source, dim)
    count, rest = ("pieces",), () if sizes[0].number == 1 else ("rest",)
    known = {"pieces": integer(len(sizes)), "rest": sizes[0]}
    operand = replaced(source, {dim: (*count, *rest)})
    piece = replaced(source, {dim: rest})
    return Factoring(
        (operand,),
        (piece,) * len(sizes),
        known,
        frozenset(count),
        FIRST,
        literals=_piece_sizes(call, rest, len(sizes)),
    )


def _unequal_pieces(call: Call, source: Dims, dim: int) -> Factoring:
    new = [
        replaced(source, {dim: () if shape[dim].number == 1 else (f"piece{i}",)})
        for i, shape in enumerate(call.results)
    ]
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


def concatenated(call: Call) -> Factoring:
    """Join tensors along a dim, which stays whole; empty tensors of one dim count for nothing."""
    result = call.results[0]
    dim = call.dim("dim", len(result))
    filled = [i for i, operand in enumerate(call.operands) if not _is_legacy_empty(operand.shape, result)]
    target = dims_of(result)
    operands = [dims_of(operand.shape, f"e{i}_") for i, operand in enumerate(call.operands)]
    alone = len(filled) == 1
    for i in filled:
        shape = call.operands[i].shape
        own = () if shape[dim].number == 1 else (f"p{i}",)
        operands[i] = target if alone else replaced(target, {dim: own})
    whole = frozenset().union(*(names(dims, range(len(dims))) for i, dims in enumerate(operands) if i not in filled))
    joined = frozenset() if alone else names(target, [dim]).union(*(names(operands[i], [dim]) for i in filled))
    return Factoring(tuple(operands), (target,), whole=whole | joined, linear=(frozenset(range(len(operands))),))


def differences(call: Call) -> Factoring:
    """Subtract neighbours along a dim, which stays whole in the operand and in what is put before and after it."""
    target = dims_of(call.results[0])
    dim = call.dim("dim", len(target))
    operands = tuple(
        replaced(target, {dim: () if operand.shape[dim].number == 1 else (f"p{i}",)})
        for i, operand in enumerate(call.operands)
    )
    whole = names(target, [dim]).union(*(names(dims, [dim]) for dims in operands))
    return Factoring(operands, (target,), whole=whole, linear=(frozenset(range(len(operands))),))


def _is_legacy_empty(shape: Shape, result: Shape) -> bool:
    return len(shape) == 1 and shape[0].number == 0 and len(result) > 1


def overwritten(call: Call) -> Factoring:
    """Write a tensor into a range or an index of a dim, which stays whole."""
    dims, rank = dims_of(call.operands[0].shape), len(call.operands[0].shape)
    dim = call.dim("dim", rank)
    shape = call.operands[1].shape
    if shape == call.operands[0].shape:
        return Factoring((dims, dims), (dims,), linear=(frozenset({0, 1}),))
    own = dims_of(shape, "o")[dim : dim + 1] if len(shape) == rank else ()
    written = (*dims[:dim], *own, *dims[dim + 1 :])
    whole = names(dims, [dim]) | names(own, range(len(own)))
    return Factoring((dims, written), (dims,), whole=whole, linear=(frozenset({0, 1}),))


def stacked(call: Call) -> Factoring:
    """Stack tensors along a new dim, which stays whole."""
    result = dims_of(call.results[0])
    dim = call.dim("dim", len(result))
    operand = result[:dim] + result[dim + 1 :]
    count = len(call.operands)
    return Factoring((operand,) * count, (result,), whole=names(result, [dim]), linear=(frozenset(range(count)),))


def padded(call: Call) -> Factoring:
    """Pad dims at their ends; the padded ones stay whole. Linear if zeros are written."""
    rank = len(call.operands[0].shape)
    given = call.arguments["pad"]
    dims = [rank - 1 - i // 2 for i in range(0, len(given), 2) if given[i] != 0 or given[i + 1] != 0]
    factoring = _cut(call, dims)
    zeros = call.arguments.get("mode", "constant") != "constant" or not call.arguments.get("value")
    whole = factoring.whole | names(factoring.operands[0], dims)
    return Factoring(factoring.operands, factoring.results, whole=whole, linear=FIRST if zeros else ())


def unfolded(call: Call) -> Factoring:
    """Take windows of a dim, which stays whole, as do their number and size."""
    shape, result = call.operands[0].shape, call.results[0]
    dim = call.dim("dimension", len(shape))
    source, new = dims_of(shape), dims_of(result, "o")
    target = (*replaced(source, {dim: new[dim]}), new[-1])
    return Factoring((source,), (target,), whole=names(source, [dim]) | names(new, [dim, len(new) - 1]), linear=FIRST)


def diagonal(call: Call) -> Factoring:
    """Take the diagonal of two dims, which stay whole, as does the result's last."""
    dims, rank = dims_of(call.operands[0].shape), len(call.operands[0].shape)
    pair = [call.dim("dim1", rank), call.dim("dim2", rank)]
    last = dims_of(call.results[0], "o")[-1]
    target = (*(dim for i, dim in enumerate(dims) if i not in pair), last)
    return Factoring((dims,), (target,), whole=names(dims, pair) | frozenset(last), linear=FIRST)


def _triangular(call: Call) -> Factoring:
    """Keep a triangle of the last two dims, which stay whole."""
    rank = len(call.operands[0].shape)
    return kept(call, [rank - 2, rank - 1], linear=True)


def _rolled(call: Call) -> Factoring:
    """Flip or roll along dims, which stay whole."""
    return kept(call, call.dims("dims", len(call.operands[0].shape)), linear=True)


RULES: tuple[Rule, ...] = (
    *built(sliced, "slice.Tensor", "narrow", traits=KEEPS_ZEROS),
    *built(_selected, "select.int", traits=KEEPS_ZEROS),
    *built(_unbound, "unbind.int", traits=KEEPS_ZEROS),
    *built(pieces, "split.Tensor", "split_with_sizes", "chunk", traits=KEEPS_ZEROS),
    *built(pieces, "split.sizes", "tensor_split.sections"),
    *built(concatenated, "cat", "concat", "concatenate"),
    *built(differences, "diff"),
    *built(overwritten, "slice_scatter", "select_scatter"),
    *built(stacked, "stack"),
    *built(padded, "pad", "constant_pad_nd"),
    *built(_rolled, "flip", "roll"),
    *built(_triangular, "tril", "triu"),
    *built(unfolded, "unfold"),
    *built(diagonal, "diagonal"),
)
