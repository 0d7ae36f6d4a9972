"""Ops that rearrange elements: every factor they do not cut across passes through, and all are linear.

A reshape is factored from its shapes alone: sizes are matched from both ends, a multiple is split into the
other and the rest. Sizes that do not refine (4 x 6 seen as 6 x 4) stay whole.

Ops that cut dims or put them together: the dim in question stays whole, all others pass; all are linear. Cutting a dim
into equal pieces refines it instead: (pieces, rest), and the rest passes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetu_fx.deduction.rules.build import (
    FIRST,
    broadcast,
    change_dims,
    factor_dim,
    fresh_dims,
    group_factors,
    keep_dims,
    kept_along,
    lines,
    literals,
    names,
    opaque,
    replace_dims,
    rules_for_ops,
)
from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.forms import KEEPS_ZEROS
from hetu_fx.deduction.rules.partition import Partition
from hetu_fx.deduction.rules.reduction import reduce_dims
from hetu_fx.deduction.rules.rule import Dim, Dims, Factoring, LiteralSize, Rule, factor_names
from hetu_fx.deduction.rules.size import Size, integer


def _common_factors(source: Shape, target: Shape) -> tuple[Dims, Dims, dict[str, Size], frozenset[str]]:
    """Return the common factors of two shapes of one tensor: dims of both, sizes, and what does not
    refine."""
    partition = Partition()
    left = [partition.new(size) for size in source]
    right = [partition.new(size) for size in target]
    ones = {factor for factor in (*left, *right) if partition.size(factor).number == 1}
    misfits = partition.unify([f for f in left if f not in ones], [f for f in right if f not in ones])
    sizes = {f"f{atom}": partition.size(atom) for atom in partition.atoms((*left, *right))}
    dims = [
        tuple(() if f in ones else tuple(f"f{atom}" for atom in partition.atoms((f,))) for f in side)
        for side in (left, right)
    ]
    return dims[0], dims[1], sizes, frozenset(f"f{atom}" for atom in partition.atoms(misfits))


def _reshaped(call: Call) -> Factoring:
    """Reshape, flatten, squeeze or unsqueeze; factors follow from the shapes."""
    source, target, sizes, whole = _common_factors(call.operands[0].shape, call.results[0])
    given = "size" if "size" in call.arguments else "shape"
    found = literals(call, given, target)
    return Factoring((source,), (target,), sizes, whole, linear=FIRST, literals=found)


def _reshaped_like(call: Call) -> Factoring:
    """Reshape to the shape of another tensor, which is cut as the result is."""
    source, target, sizes, whole = _common_factors(call.operands[0].shape, call.results[0])
    return Factoring((source, target), (target,), sizes, whole, linear=FIRST)


def _squeezed(call: Call) -> Factoring:
    """Drop dims of size 1; dims that might be dropped were they cut to size 1 stay whole."""
    factoring = _reshaped(call)
    return replace(factoring, whole=factoring.whole | names(factoring.operands[0], call.dims()))


def _unflattened(call: Call) -> Factoring:
    """Split one dim into several; factors follow from the shapes."""
    source, target, sizes, whole = _common_factors(call.operands[0].shape, call.results[0])
    dim, count = call.dim(), len(target) - call.rank + 1
    found = literals(call, "sizes", target[dim : dim + count])
    return Factoring((source,), (target,), sizes, whole, FIRST, literals=found)


def _expand_dims(call: Call) -> Factoring:
    """Repeat dims of size 1; the new factors belong to the result alone."""
    dims = fresh_dims(call.results[0])
    operands = tuple(broadcast(operand.shape, dims) for operand in call.operands)
    return Factoring(operands, (dims,), linear=FIRST, literals=literals(call, "size", dims))


def _swap_dims(call: Call) -> Factoring:
    """Swap two dims, named dim0 and dim1 or axis0 and axis1, or the last two."""
    _, *given = call.arguments.values()
    order = list(range(call.rank))
    if call.rank > 1:
        a, b = given or (-2, -1)
        order[a], order[b] = order[b], order[a]
    return _permutation(call, order)


def _permute_dims(call: Call) -> Factoring:
    """Put the dims in a given order, or in the reverse one."""
    return _permutation(call, call.dims("dims") if "dims" in call.arguments else range(call.rank)[::-1])


def _move_dims(call: Call) -> Factoring:
    """Move dims to new places, the others keep their order."""
    source, target = call.dims("source"), call.dims("destination")
    rest = iter([dim for dim in range(call.rank) if dim not in source])
    places = dict(zip(target, source, strict=True))
    return _permutation(call, [places[i] if i in places else next(rest) for i in range(call.rank)])


def _permutation(call: Call, order: Sequence[int]) -> Factoring:
    dims = fresh_dims(call.operands[0].shape)
    return Factoring((dims,), (tuple(dims[i] for i in order),), linear=FIRST)


def _repeat_dims(call: Call) -> Factoring:
    """Repeat the tensor along its dims: a dim becomes (repeats, itself)."""
    shape, result = call.operands[0].shape, call.results[0]
    offset = len(result) - len(shape)
    argument = "repeats" if "repeats" in call.arguments else "dims"
    first = len(result) - len(call.arguments[argument])
    source, target, sizes = fresh_dims(shape), [], {}
    found: list[LiteralSize] = []
    for i, size in enumerate(result):
        inner = source[i - offset] if i >= offset else ()
        times = size.over(shape[i - offset]) if inner else size
        outer = () if times is None or times.number == 1 else (f"r{i}",)
        sizes.update({name: times for name in outer if times is not None})
        if inner:
            sizes.update(dict.fromkeys(inner, shape[i - offset]))
        target.append(outer + inner)
        found.extend([LiteralSize(call.at(argument, i - first), outer)] if outer else [])
    return Factoring((source,), (tuple(target),), sizes, linear=FIRST, literals=tuple(found))


def _mixed_channels(call: Call) -> Factoring:
    """Turn channels (groups, rest) into (rest, groups); both pass."""
    shape, dims = call.operands[0].shape, fresh_dims(call.operands[0].shape)
    groups = integer(call.integer("groups"))
    if shape[1].over(groups) is None:  # only the run tells how many channels a group has
        return keep_dims(call, [1], linear=True)
    outer, inner, sizes = group_factors(shape[1], groups, "g", "r")
    source, target = (replace_dims(dims, {1: pair}) for pair in ((*outer, *inner), (*inner, *outer)))
    found = (LiteralSize(call.at("groups"), outer),) if outer else ()
    return Factoring((source,), (target,), sizes, linear=FIRST, literals=found)


def _repeat_each(call: Call) -> Factoring:
    """Repeat each element of a dim in place: the dim becomes (itself, repeats)."""
    shape, result = call.operands[0].shape, call.results[0]
    flat = call.arguments.get("dim") is None and len(shape) != 1
    dim = call.dim()
    times = None if flat else result[dim].over(shape[dim])
    source = fresh_dims(shape)
    if times is None:
        target = fresh_dims(result, "o")
        return Factoring((source,), (target,), whole=names(source + target), linear=FIRST)
    known = {"times": times} | {name: shape[dim] for name in source[dim]}
    extra = factor_dim("times", times)
    target = replace_dims(source, {dim: source[dim] + extra})
    found = (LiteralSize(call.at("repeats"), extra),) if extra else ()
    return Factoring((source,), (target,), known, linear=FIRST, literals=found)


VIEWS: tuple[Rule, ...] = (
    *rules_for_ops(_reshaped, "view", "reshape", "_unsafe_view", "flatten.using_ints", "unsqueeze", traits=KEEPS_ZEROS),
    *rules_for_ops(_reshaped, "ravel", "view_copy"),
    *rules_for_ops(_reshaped_like, "view_as", "reshape_as"),
    *rules_for_ops(_squeezed, "squeeze", "squeeze.dim", traits=KEEPS_ZEROS),
    *rules_for_ops(_squeezed, "squeeze.dims"),
    *rules_for_ops(_unflattened, "unflatten.int"),
    *rules_for_ops(_expand_dims, "expand", traits=KEEPS_ZEROS),
    *rules_for_ops(_expand_dims, "expand_as", "broadcast_to"),
    *rules_for_ops(_swap_dims, "transpose.int", "t", traits=KEEPS_ZEROS),
    *rules_for_ops(_swap_dims, "swapaxes", "swapdims", "mT", "adjoint", "mH"),
    *rules_for_ops(_permute_dims, "permute", traits=KEEPS_ZEROS),
    *rules_for_ops(_permute_dims, "numpy_T"),
    *rules_for_ops(_move_dims, "movedim.intlist", "movedim.int", "moveaxis.intlist", "moveaxis.int"),
    *rules_for_ops(_repeat_dims, "repeat", "tile"),
    *rules_for_ops(_mixed_channels, "channel_shuffle"),
    *rules_for_ops(_repeat_each, "repeat_interleave.self_int"),
    *lines("... [c] -> ...", "view_as_complex", linear="all"),
    *lines("... -> ... [c]", "view_as_real", linear="all"),
)


def _slice_dim(call: Call) -> Factoring:
    """Take a range of a dim, which stays whole unless all of it is taken."""
    return _cut(call, (call.dim(),))


def _cut(call: Call, dims: Sequence[int]) -> Factoring:
    """Return the factoring of an op that changes the sizes of some dims: there both sides stay whole."""
    shape, result = call.operands[0].shape, call.results[0]
    return change_dims(call, [dim for dim in dims if shape[dim] != result[dim]])


def pieces(call: Call, *, along: int | None = None) -> Factoring:
    """Cut a dim into pieces: equal ones refine it into (pieces, rest) and the rest passes; unequal ones keep
    it whole."""
    dim = call.dim() if along is None else min(along, call.rank - 1)
    sizes = [result[dim] for result in call.results]
    source = fresh_dims(call.operands[0].shape)
    if len(sizes) == 1:
        return Factoring((source,), (source,), linear=FIRST, literals=_piece_sizes(call, source[dim], 1))
    if any(size != sizes[0] for size in sizes):
        return _unequal_pieces(call, source, dim)
    count, rest = ("pieces",), factor_dim("rest", sizes[0])
    known = {"pieces": integer(len(sizes)), "rest": sizes[0]}
    operand, piece = replace_dims(source, {dim: (*count, *rest)}), replace_dims(source, {dim: rest})
    found = _piece_sizes(call, rest, len(sizes))
    return Factoring((operand,), (piece,) * len(sizes), known, frozenset(count), FIRST, literals=found)


def _pieces_at(call: Call, *, along: int | None = None) -> Factoring:
    """Cut a dim at given places; it stays whole."""
    dim = call.dim() if along is None else min(along, call.rank - 1)
    return _unequal_pieces(call, fresh_dims(call.operands[0].shape), dim)


def _unequal_pieces(call: Call, source: Dims, dim: int) -> Factoring:
    new = [replace_dims(source, {dim: factor_dim(f"piece{i}", shape[dim])}) for i, shape in enumerate(call.results)]
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


def _join_along_dim(call: Call, *, along: int | None = None) -> Factoring:
    """Join tensors along a dim, which stays whole; empty tensors of one dim count for nothing."""
    result = call.results[0]
    dim = call.dim(rank=len(result)) if along is None else along
    filled = [i for i, operand in enumerate(call.operands) if not _is_legacy_empty(operand.shape, result)]
    target = fresh_dims(result)
    operands = [fresh_dims(operand.shape, f"e{i}_") for i, operand in enumerate(call.operands)]
    alone = len(filled) == 1
    for i in filled:
        own = factor_dim(f"p{i}", call.operands[i].shape[dim])
        operands[i] = target if alone else replace_dims(target, {dim: own})
    whole = factor_names(dims for i, dims in enumerate(operands) if i not in filled)
    joined = frozenset() if alone else names(target, [dim]).union(*(names(operands[i], [dim]) for i in filled))
    return Factoring(tuple(operands), (target,), whole=whole | joined, linear=(frozenset(range(len(operands))),))


def _put_beside(call: Call, *, along: int) -> Factoring:
    """Join tensors along a dim of a given place, which stays whole; those of fewer dims get some first."""
    ranks = {len(operand.shape) for operand in call.operands}
    return (
        _join_along_dim(call, along=along) if ranks == {len(call.results[0])} and min(ranks) > along else opaque(call)
    )


def differences(call: Call) -> Factoring:
    """Subtract neighbours along a dim, which stays whole in the operand and in what is put before and after it."""
    target = fresh_dims(call.results[0])
    dim = call.dim(rank=len(target))
    ends = [factor_dim(f"p{i}", operand.shape[dim]) for i, operand in enumerate(call.operands)]
    operands = tuple(replace_dims(target, {dim: end}) for end in ends)
    whole = names(target, [dim]).union(*(names(dims, [dim]) for dims in operands))
    return Factoring(operands, (target,), whole=whole, linear=(frozenset(range(len(operands))),))


def _is_legacy_empty(shape: Shape, result: Shape) -> bool:
    return len(shape) == 1 and shape[0].number == 0 and len(result) > 1


def overwritten(call: Call) -> Factoring:
    """Write a tensor into a range or an index of a dim, which stays whole."""
    dims, dim, shape = fresh_dims(call.operands[0].shape), call.dim(), call.operands[1].shape
    if shape == call.operands[0].shape:
        return Factoring((dims, dims), (dims,), linear=(frozenset({0, 1}),))
    own = fresh_dims(shape, "o")[dim : dim + 1] if len(shape) == call.rank else ()
    written = (*dims[:dim], *own, *dims[dim + 1 :])
    whole = names(dims, [dim]) | names(own)
    return Factoring((dims, written), (dims,), whole=whole, linear=(frozenset({0, 1}),))


def _stack_along_dim(call: Call) -> Factoring:
    """Stack tensors along a new dim, which stays whole."""
    result = fresh_dims(call.results[0])
    dim = call.dim(rank=len(result))
    operand = result[:dim] + result[dim + 1 :]
    count = len(call.operands)
    return Factoring((operand,) * count, (result,), whole=names(result, [dim]), linear=(frozenset(range(count)),))


def _pad_dims(call: Call) -> Factoring:
    """Pad dims at their ends; the padded ones stay whole. Linear if zeros are written."""
    given = call.arguments["pad"]
    dims = [call.rank - 1 - i // 2 for i in range(0, len(given), 2) if given[i] != 0 or given[i + 1] != 0]
    factoring = _cut(call, dims)
    zeros = call.arguments.get("mode", "constant") != "constant" or not call.arguments.get("value")
    whole = factoring.whole | names(factoring.operands[0], dims)
    return replace(factoring, whole=whole, linear=FIRST if zeros else ())


def _unfolded(call: Call) -> Factoring:
    """Take windows of a dim, which stays whole, as do their number and size."""
    factoring, window = change_dims(call, [call.dim("dimension")]), factor_dim("window", call.results[0][-1])
    return replace(factoring, results=((*factoring.results[0], window),), whole=factoring.whole.union(window))


def _turned(call: Call) -> Factoring:
    """Turn two dims by right angles; both stay whole."""
    return change_dims(call, call.dims("dims"))


def _on_diagonal(call: Call) -> Factoring:
    """Write the last dim on the diagonal of two new ones, all of which stay whole."""
    source, made = fresh_dims(call.operands[0].shape), fresh_dims(call.results[0], "o")
    pair = [call.dim(name, rank=len(made)) for name in ("dim1", "dim2")]
    rest = iter(source[:-1])
    target = tuple(dims if i in pair else next(rest) for i, dims in enumerate(made))
    return Factoring((source,), (target,), whole=names(source[-1:]) | names(target, pair), linear=FIRST)


def diagonal(call: Call) -> Factoring:
    """Take the diagonal of two dims, which stay whole, as does the result's last."""
    dims, pair = fresh_dims(call.operands[0].shape), [call.dim("dim1"), call.dim("dim2")]
    last = factor_dim("diagonal", call.results[0][-1])
    target = (*(dim for i, dim in enumerate(dims) if i not in pair), last)
    return Factoring((dims,), (target,), whole=names(dims, pair) | frozenset(last), linear=FIRST)


def _diagonal_written(call: Call) -> Factoring:
    """Write a tensor on the diagonal of two dims, which stay whole, as does its last one."""
    dims, pair = fresh_dims(call.operands[0].shape), [call.dim("dim1"), call.dim("dim2")]
    last = factor_dim("diagonal", call.operands[1].shape[-1])
    written = (*(dim for i, dim in enumerate(dims) if i not in pair), last)
    whole = names(dims, pair) | frozenset(last)
    return Factoring((dims, written), (dims,), whole=whole, linear=(frozenset({0, 1}),))


SLICES: tuple[Rule, ...] = (
    *rules_for_ops(_slice_dim, "slice.Tensor", "narrow", traits=KEEPS_ZEROS),
    *rules_for_ops(reduce_dims, "select.int", "unbind.int", traits=KEEPS_ZEROS, linear=True, whole=True),
    *rules_for_ops(pieces, "split.Tensor", "split_with_sizes", "chunk", traits=KEEPS_ZEROS),
    *rules_for_ops(pieces, "split.sizes", "tensor_split.sections"),
    *rules_for_ops(_join_along_dim, "cat", "concat", "concatenate"),
    *rules_for_ops(differences, "diff"),
    *rules_for_ops(overwritten, "slice_scatter", "select_scatter"),
    *rules_for_ops(_stack_along_dim, "stack"),
    *rules_for_ops(_pad_dims, "pad", "constant_pad_nd"),
    *rules_for_ops(kept_along, "flip", "roll", argument="dims", linear=True),
    *rules_for_ops(keep_dims, "tril", "triu", whole=(-2, -1), linear=True),
    *rules_for_ops(_unfolded, "unfold"),
    *rules_for_ops(diagonal, "diagonal", "linalg_diagonal"),
    *rules_for_ops(_on_diagonal, "diag_embed"),
    *rules_for_ops(_diagonal_written, "diagonal_scatter"),
    *rules_for_ops(keep_dims, "fliplr", whole=(1,), linear=True),
    *rules_for_ops(keep_dims, "flipud", whole=(0,), linear=True),
    *rules_for_ops(_turned, "rot90"),
    *rules_for_ops(pieces, "unsafe_split.Tensor", "unsafe_split_with_sizes", "unsafe_chunk"),
    *rules_for_ops(pieces, "hsplit.int", along=1),
    *rules_for_ops(pieces, "vsplit.int", along=0),
    *rules_for_ops(pieces, "dsplit.int", along=2),
    *rules_for_ops(_pieces_at, "tensor_split.indices"),
    *rules_for_ops(_pieces_at, "hsplit.array", along=1),
    *rules_for_ops(_pieces_at, "vsplit.array", along=0),
    *rules_for_ops(_pieces_at, "dsplit.array", along=2),
    *rules_for_ops(_put_beside, "vstack", along=0),
    *rules_for_ops(_put_beside, "hstack", "column_stack", along=1),
    *rules_for_ops(_put_beside, "dstack", along=2),
)

RULES: tuple[Rule, ...] = (*VIEWS, *SLICES)
