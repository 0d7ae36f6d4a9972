"""Ops that rearrange elements: every factor they do not cut across passes through, and all are linear.

A reshape is factored from its shapes alone: sizes are matched from both ends, a multiple is split into the other and
the rest. Sizes that do not refine (4 x 6 seen as 6 x 4) stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetu_fx.deduction.call import Call, Shape
from hetu_fx.deduction.partition import Partition
from hetu_fx.deduction.rule import Dim, Dims, Factoring, LiteralSize, Rule
from hetu_fx.deduction.rules.build import (
    FIRST,
    aligned,
    built,
    dims_of,
    kept,
    lines,
    literals,
    names,
    replaced,
)
from hetu_fx.deduction.size import Size, integer


def refined(source: Shape, target: Shape) -> tuple[Dims, Dims, dict[str, Size], frozenset[str]]:
    """Return the common factors of two shapes of one tensor: dims of both, sizes, and what does not refine."""
    partition = Partition()
    left = [partition.new(size) for size in source]
    right = [partition.new(size) for size in target]
    ones = {factor for factor in (*left, *right) if partition.size(factor).number == 1}
    conflict = partition.unify([f for f in left if f not in ones], [f for f in right if f not in ones])
    whole = partition.atoms((*conflict.left, *conflict.right)) if conflict else ()
    sizes = {f"f{atom}": partition.size(atom) for atom in partition.atoms((*left, *right))}
    dims = [
        tuple(() if f in ones else tuple(f"f{atom}" for atom in partition.atoms((f,))) for f in side)
        for side in (left, right)
    ]
    return dims[0], dims[1], sizes, frozenset(f"f{atom}" for atom in whole)


def reshaped(call: Call) -> Factoring:
    """Reshape, flatten, squeeze or unsqueeze; factors follow from the shapes."""
    source, target, sizes, whole = refined(call.operands[0].shape, call.results[0])
    given = "size" if "size" in call.arguments else "shape"
    found = literals(call, given, target)
    return Factoring((source,), (target,), sizes, whole, linear=FIRST, literals=found)


def reshaped_like(call: Call) -> Factoring:
    """Reshape to the shape of another tensor, which is cut as the result is."""
    source, target, sizes, whole = refined(call.operands[0].shape, call.results[0])
    return Factoring((source, target), (target,), sizes, whole, linear=FIRST)


def squeezed(call: Call) -> Factoring:
    """Drop dims of size 1; dims that might be dropped were they cut to size 1 stay whole."""
    shape = call.operands[0].shape
    asked = call.dims("dim", len(shape))
    factoring = reshaped(call)
    return replace(factoring, whole=factoring.whole | names(factoring.operands[0], asked))


def unflattened(call: Call) -> Factoring:
    """Split one dim into several; factors follow from the shapes."""
    rank = len(call.operands[0].shape)
    dim = call.dim("dim", rank)
    source, target, sizes, whole = refined(call.operands[0].shape, call.results[0])
    count = len(target) - rank + 1
    return Factoring(
        (source,), (target,), sizes, whole, FIRST, literals=literals(call, "sizes", target[dim : dim + count])
    )


def expanded(call: Call) -> Factoring:
    """Repeat dims of size 1; the new factors belong to the result alone."""
    target = call.results[0]
    dims = dims_of(target)
    operands = tuple(aligned(operand.shape, target) for operand in call.operands)
    return Factoring(operands, (dims,), linear=FIRST, literals=literals(call, "size", dims))


def transposed(call: Call) -> Factoring:
    """Swap two dims."""
    rank = len(call.operands[0].shape)
    _, first, second = call.arguments  # named dim0 and dim1, or axis0 and axis1
    a, b = (call.dim(name, rank) for name in (first, second))
    order = list(range(rank))
    if rank:
        order[a], order[b] = b, a
    return _permutation(call, order)


def flipped_matrix(call: Call) -> Factoring:
    """Swap the last two dims."""
    rank = len(call.operands[0].shape)
    return _permutation(call, [*range(rank - 2), *reversed(range(max(rank - 2, 0), rank))])


def permuted(call: Call) -> Factoring:
    """Put the dims in a given order."""
    return _permutation(call, call.dims("dims", len(call.operands[0].shape)))


def moved(call: Call) -> Factoring:
    """Move dims to new places, the others keep their order."""
    rank = len(call.operands[0].shape)
    source, target = call.dims("source", rank), call.dims("destination", rank)
    rest = iter([dim for dim in range(rank) if dim not in source])
    places = dict(zip(target, source, strict=True))
    return _permutation(call, [places[i] if i in places else next(rest) for i in range(rank)])


def _permutation(call: Call, order: Sequence[int]) -> Factoring:
    dims = dims_of(call.operands[0].shape)
    return Factoring((dims,), (tuple(dims[i] for i in order),), linear=FIRST)


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


def selected(call: Call) -> Factoring:
    """Take one index of a dim, which stays whole and is gone."""
    dims = dims_of(call.operands[0].shape)
    dim = call.dim("dim", len(dims))
    return Factoring((dims,), (dims[:dim] + dims[dim + 1 :],), whole=names(dims, [dim]), linear=FIRST)


def unbound(call: Call) -> Factoring:
    """Take every index of a dim as a tensor of its own; the dim stays whole and is gone."""
    dims = dims_of(call.operands[0].shape)
    dim = call.dim("dim", len(dims))
    piece = dims[:dim] + dims[dim + 1 :]
    return Factoring((dims,), (piece,) * len(call.results), whole=names(dims, [dim]), linear=FIRST)


def pieces(call: Call) -> Factoring:
    """Cut a dim into pieces: equal ones refine it into (pieces, rest) and the rest passes; unequal ones keep it whole."""
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
    whole = frozenset().union(
        *(names(dims, range(len(dims))) for i, dims in enumerate(operands) if i not in filled)
    )
    joined = (
        frozenset() if alone else names(target, [dim]).union(*(names(operands[i], [dim]) for i in filled))
    )
    return Factoring(
        tuple(operands), (target,), whole=whole | joined, linear=(frozenset(range(len(operands))),)
    )


def _is_legacy_empty(shape: Shape, result: Shape) -> bool:
    return len(shape) == 1 and shape[0].number == 0 and len(result) > 1


def overwritten(call: Call) -> Factoring:
    """Write a tensor into a range or an index of a dim, which stays whole."""
    dims, rank = dims_of(call.operands[0].shape), len(call.operands[0].shape)
    dim = call.dim("dim", rank)
    source = dims_of(call.operands[1].shape, "o")
    own = source[dim : dim + 1] if len(source) == rank else ()
    written = (*dims[:dim], *own, *dims[dim + 1 :])
    whole = names(dims, [dim]) | names(own, range(len(own)))
    return Factoring((dims, written), (dims,), whole=whole, linear=(frozenset({0, 1}),))


def stacked(call: Call) -> Factoring:
    """Stack tensors along a new dim, which stays whole."""
    result = dims_of(call.results[0])
    dim = call.dim("dim", len(result))
    operand = result[:dim] + result[dim + 1 :]
    count = len(call.operands)
    return Factoring(
        (operand,) * count, (result,), whole=names(result, [dim]), linear=(frozenset(range(count)),)
    )


def repeated(call: Call) -> Factoring:
    """Repeat the tensor along its dims: a dim becomes (repeats, itself)."""
    shape, result = call.operands[0].shape, call.results[0]
    offset = len(result) - len(shape)
    source, target, sizes = dims_of(shape), [], {}
    found: list[LiteralSize] = []
    for i, size in enumerate(result):
        inner = source[i - offset] if i >= offset else ()
        times = size.over(shape[i - offset]) if inner else size
        outer = () if times is None or times.number == 1 else (f"r{i}",)
        sizes.update({name: times for name in outer if times is not None})
        sizes.update({name: shape[i - offset] for name in inner})
        target.append(outer + inner)
        found.extend([LiteralSize(call.at("repeats", i), outer)] if outer else [])
    return Factoring((source,), (tuple(target),), sizes, linear=FIRST, literals=tuple(found))


def interleaved(call: Call) -> Factoring:
    """Repeat each element of a dim in place: the dim becomes (itself, repeats)."""
    shape, result = call.operands[0].shape, call.results[0]
    flat = call.arguments.get("dim") is None and len(shape) > 1
    dim = call.dim("dim", len(shape))
    times = None if flat else result[dim].over(shape[dim])
    source = dims_of(shape)
    if times is None:
        target = dims_of(result, "o")
        return Factoring(
            (source,), (target,), whole=names(source + target, range(len(source + target))), linear=FIRST
        )
    known = {"times": times} | {name: shape[dim] for name in source[dim]}
    extra = () if times.number == 1 else ("times",)
    target = replaced(source, {dim: source[dim] + extra})
    found = (LiteralSize(call.at("repeats"), extra),) if extra else ()
    return Factoring((source,), (target,), known, linear=FIRST, literals=found)


def padded(call: Call) -> Factoring:
    """Pad dims at their ends; the padded ones stay whole. Linear if zeros are written."""
    rank = len(call.operands[0].shape)
    given = call.arguments["pad"]
    dims = [rank - 1 - i // 2 for i in range(0, len(given), 2) if given[i] != 0 or given[i + 1] != 0]
    factoring = _cut(call, dims)
    zeros = call.arguments.get("mode", "constant") != "constant" or not call.arguments.get("value")
    whole = factoring.whole | names(factoring.operands[0], dims)
    return Factoring(factoring.operands, factoring.results, whole=whole, linear=FIRST if zeros else ())


def rolled(call: Call) -> Factoring:
    """Flip or roll along dims, which stay whole."""
    return kept(call, call.dims("dims", len(call.operands[0].shape)), linear=True)


def triangular(call: Call) -> Factoring:
    """Keep a triangle of the last two dims, which stay whole."""
    rank = len(call.operands[0].shape)
    return kept(call, [rank - 2, rank - 1], linear=True)


def unfolded(call: Call) -> Factoring:
    """Take windows of a dim, which stays whole, as do their number and size."""
    shape, result = call.operands[0].shape, call.results[0]
    dim = call.dim("dimension", len(shape))
    source, new = dims_of(shape), dims_of(result, "o")
    target = (*replaced(source, {dim: new[dim]}), new[-1])
    return Factoring(
        (source,), (target,), whole=names(source, [dim]) | names(new, [dim, len(new) - 1]), linear=FIRST
    )


def diagonal(call: Call) -> Factoring:
    """Take the diagonal of two dims, which stay whole, as does the result's last."""
    dims, rank = dims_of(call.operands[0].shape), len(call.operands[0].shape)
    pair = [call.dim("dim1", rank), call.dim("dim2", rank)]
    last = dims_of(call.results[0], "o")[-1]
    target = (*(dim for i, dim in enumerate(dims) if i not in pair), last)
    return Factoring((dims,), (target,), whole=names(dims, pair) | frozenset(last), linear=FIRST)


RULES: tuple[Rule, ...] = (
    *built(reshaped, "view", "reshape", "_unsafe_view", "flatten.using_ints", "unsqueeze", "ravel", "view_copy"),
    *built(reshaped_like, "view_as", "reshape_as"),
    *built(squeezed, "squeeze", "squeeze.dim", "squeeze.dims"),
    *built(unflattened, "unflatten.int"),
    *built(expanded, "expand", "expand_as", "broadcast_to"),
    *built(transposed, "transpose.int", "swapaxes", "swapdims"),
    *built(flipped_matrix, "t", "mT", "adjoint"),
    *built(permuted, "permute"),
    *built(moved, "movedim.intlist", "moveaxis.intlist"),
    *built(sliced, "slice.Tensor", "narrow"),
    *built(selected, "select.int"),
    *built(unbound, "unbind.int"),
    *built(pieces, "split.Tensor", "split_with_sizes", "split.sizes", "chunk", "tensor_split.sections"),
    *built(concatenated, "cat", "concat", "concatenate"),
    *built(overwritten, "slice_scatter", "select_scatter"),
    *built(stacked, "stack"),
    *built(repeated, "repeat"),
    *built(interleaved, "repeat_interleave.self_int"),
    *built(padded, "pad", "constant_pad_nd"),
    *built(rolled, "flip", "roll"),
    *built(triangular, "tril", "triu"),
    *built(unfolded, "unfold"),
    *built(diagonal, "diagonal"),
    *lines("... [c] -> ...", "view_as_complex", linear="all"),
    *lines("... -> ... [c]", "view_as_real", linear="all"),
)
