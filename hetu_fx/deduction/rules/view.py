"""Ops that rearrange elements: every factor they do not cut across passes through, and all are linear.

A reshape is factored from its shapes alone: sizes are matched from both ends, a multiple is split into the
other and the rest. Sizes that do not refine (4 x 6 seen as 6 x 4) stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetu_fx.deduction.rules.build import (
    FIRST,
    broadcast,
    factor_dim,
    fresh_dims,
    group_factors,
    keep_dims,
    lines,
    literals,
    names,
    replace_dims,
    rules_for_ops,
)
from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.forms import KEEPS_ZEROS
from hetu_fx.deduction.rules.partition import Partition
from hetu_fx.deduction.rules.rule import Dims, Factoring, LiteralSize, Rule
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


RULES: tuple[Rule, ...] = (
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
