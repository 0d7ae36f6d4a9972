"""Products of matrices, and attention, which is two of them.

The contracted factor of a product is summed, rows, columns and batch dims pass through. In attention batch, heads,
queries and value channels do; keys and their channels stay whole.

Linear algebra: of matrices and vectors the last dims stay whole, what stands before them is batch and passes. Solutions
are linear in right-hand sides, products along a dim in each factor.

Convolution, pooling and recurrence: batch and channels pass through (input channels are summed), space stays whole. In
a recurrence rows of the batch pass through, time steps and hidden channels stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from hetu_fx.deduction.rules.build import (
    EACH,
    broadcast,
    broadcast_shape,
    change_dims,
    factor_dim,
    fresh_dims,
    group_factors,
    lines,
    names,
    replace_dims,
    rules_for_ops,
)
from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.forms import OpTraits, PartCall
from hetu_fx.deduction.rules.reduction import reduce_dims
from hetu_fx.deduction.rules.rule import Dim, Dims, Factoring, LiteralSize, Rule, factor_names
from hetu_fx.deduction.rules.size import ONE, Size, integer
from hetu_fx.graph import calls, meta
from hetu_fx.graph.calls import callee, operand

aten = torch.ops.aten
BIAS_FIRST = (frozenset({0, 1}), frozenset({0, 2}))


def matmul(call: Call) -> Factoring:
    """Multiply matrices or vectors of any rank; leading dims are broadcast."""
    a, b = (operand.shape for operand in call.operands)
    result = call.results[0]
    rows, columns = min(len(a) - 1, 1), min(len(b) - 1, 1)
    at = len(result) - rows - columns
    batch, k = fresh_dims(result[:at], "b"), factor_dim("k", a[-1])
    m = tuple(factor_dim("m", size) for size in result[at : at + rows])
    n = tuple(factor_dim("n", size) for size in result[at + rows :])
    left, right = (*broadcast(a[:-2], batch), *m, k), (*broadcast(b[:-2], batch), k, *n)
    return Factoring((left, right), ((*batch, *m, *n),), linear=EACH)


def _product_plus_tensor(call: Call) -> Factoring:
    """Multiply two matrices (batched or not) and add a tensor that is broadcast to the result, once."""
    bias, a, _ = (operand.shape for operand in call.operands)
    names, k = fresh_dims(call.results[0]), factor_dim("k", a[-1])
    left, right = (*names[: len(a) - 1], k), (*names[: len(a) - 2], k, *names[len(a) - 1 :])
    return Factoring((broadcast(bias, names), left, right), (names,), linear=BIAS_FIRST, additive=frozenset({0}))


def einsum(call: Call) -> Factoring:
    """Read the factors off the equation; what a term names twice is its diagonal, and stays whole."""
    equation = str(call.arguments["equation"]).replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if "->" not in equation:
        letters = left.replace(",", "").replace("...", "")
        right = "..." * ("..." in left) + "".join(sorted(one for one in set(letters) if letters.count(one) == 1))
    operands = tuple(_letters(term, operand.shape) for term, operand in zip(terms, call.operands, strict=True))
    result = _letters(right, call.results[0])
    twice = frozenset(one for term in terms for one in term if one != "." and term.count(one) > 1)
    linear = tuple(frozenset({i}) for i in range(len(terms)))
    return Factoring(operands, (result,), whole=twice & factor_names((*operands, result)), linear=linear)


def _letters(term: str, shape: Shape) -> Dims:
    """Return the dims of a term; those of its ellipsis are counted from the right."""
    before, dots, after = term.partition("...")
    more = len(shape) - len(before) - len(after) if dots else 0
    return tuple(map(factor_dim, [*before, *(f"...{more - i}" for i in range(more)), *after], shape))


def _added_over_batch(call: Call) -> Factoring:
    """Multiply matrices pair by pair, add up the products and a tensor that is broadcast to them, once."""
    bias, a, _ = (operand.shape for operand in call.operands)
    names, b, k = fresh_dims(call.results[0]), factor_dim("b", a[0]), factor_dim("k", a[-1])
    operands = (broadcast(bias, names), (b, names[0], k), (b, k, names[1]))
    return Factoring(operands, (names,), linear=BIAS_FIRST, additive=frozenset({0}))


def _added_outer(call: Call) -> Factoring:
    """Multiply each entry of a vector with each of another, and add a tensor that is broadcast to the result."""
    names = fresh_dims(call.results[0])
    return Factoring((broadcast(call.operands[0].shape, names), names[:1], names[1:]), (names,), linear=BIAS_FIRST)


def _inner(call: Call) -> Factoring:
    """Multiply along the last dims, which are summed; numbers scale."""
    a, b = (operand.shape for operand in call.operands)
    if not a or not b:
        target = fresh_dims(call.results[0])
        return Factoring((broadcast(a, target), broadcast(b, target)), (target,), linear=EACH)
    left, right, k = fresh_dims(a[:-1], "m"), fresh_dims(b[:-1], "n"), factor_dim("k", a[-1])
    return Factoring(((*left, k), (*right, k)), ((*left, *right),), linear=EACH)


def _contracted(call: Call) -> Factoring:
    """Multiply along pairs of dims, which are summed."""
    left, right = (fresh_dims(operand.shape, prefix) for operand, prefix in zip(call.operands, "mn", strict=True))
    pairs = [call.dims(f"dims_{name}", len(dims)) for name, dims in (("self", left), ("other", right))]
    pairs = pairs if call.arguments["dims_self"] else [(), ()]
    second = replace_dims(right, {b: left[a] for a, b in zip(*pairs, strict=True)})
    kept = [dims for i, dims in enumerate(left) if i not in pairs[0]]
    kept += [dims for i, dims in enumerate(second) if i not in pairs[1]]
    return Factoring((left, second), (tuple(kept),), linear=EACH)


def _scaled_dot_product(call: Call) -> Factoring:
    """Attend: linear in the values; under a causal mask queries go by position."""
    query, key, value = (operand.shape for operand in call.operands[:3])
    result = call.results[0]
    leading = list(fresh_dims(result[:-2], "b"))
    sizes: dict[str, Size] = {}
    shared = _group_heads(call, leading, sizes)
    q, k, d, e = (factor_dim(n, s) for n, s in zip("qkde", (query[-2], key[-2], query[-1], value[-1]), strict=True))
    operands: list[Dims] = [
        (*broadcast(query[:-2], leading), q, d),
        (*broadcast(key[:-2], shared), k, d),
        (*broadcast(value[:-2], shared), k, e),
    ]
    operands.extend(broadcast(operand.shape, (*leading, q, k)) for operand in call.operands[3:])
    return Factoring(
        tuple(operands),
        ((*leading, q, e),),
        sizes,
        whole=frozenset((*k, *d)),
        linear=(frozenset({2}),),
        random=bool(call.arguments.get("dropout_p")),
        placed=frozenset(q if call.arguments.get("is_causal") else ()),
        travelling=_travelling(operands[:3], leading, shared) if k and leading else {},
    )


def _in_sequences(call: Call) -> Factoring:
    """Attend, queries and keys going by the places of their tokens, which come with them."""
    *tensors, queries, keys = call.operands
    plain = _scaled_dot_product(replace(call, operands=tuple(tensors)))
    at = factor_dim("at", keys.shape[-1])
    pairs = zip((queries, keys), plain.operands, strict=False)
    places = ((*broadcast(given.shape[:1], dims[:1]), dims[-2], at) for given, dims in pairs)
    return replace(plain, operands=(*plain.operands, *places), whole=plain.whole | {*at}, placed=frozenset())


def _sequence_places(call: Call) -> Factoring:
    """Find where sequences begin, for which all tokens of a row are compared."""
    rows, tokens, at = fresh_dims(call.results[0])
    return Factoring(((rows, tokens),), ((rows, tokens, at),), whole=frozenset((*tokens, *at)))


def _travelling(operands: list[Dims], leading: list[Dim], shared: list[Dim]) -> dict[int, str]:
    """Return the keys and values, where each device has whole rows and heads of them, with their factor."""
    plain = [dims[:-2] for dims in operands] == [tuple(leading), tuple(shared), tuple(shared)]
    return dict.fromkeys((1, 2), "k") if plain else {}


def _group_heads(call: Call, leading: list[Dim], sizes: dict[str, Size]) -> list[Dim]:
    """Return the leading dims of keys; with grouped heads, the queries' heads become (key heads, repeats)."""
    query, key = call.operands[0].shape, call.operands[1].shape
    repeats = query[-3].over(key[-3]) if call.arguments.get("enable_gqa") else ONE
    if repeats is None or repeats == ONE:
        return leading
    heads = factor_dim("heads", key[-3])
    sizes.update({"heads": key[-3], "repeats": repeats})
    shared = [*leading[:-1], heads]
    leading[-1] = (*heads, "repeats")
    return shared


def _causal_attention(part: PartCall) -> fx.Node:
    """Attend with a part of the queries: keys after its last are left out, the mask has its rows alone."""
    given, stop = dict(part.given), part.stop()
    for name in ("key", "value"):
        given[name] = part.emit(aten.slice.Tensor, given[name], -2, 0, stop)
    if part.position > 0:
        keys = part.emit(aten.sym_size.int, given["key"], len(meta.shape(operand(part.node))) - 2)
        meta.set_value(keys, meta.hint(meta.shape(operand(part.node, 1))[-2]))
        given["attn_mask"], given["is_causal"] = _rows_of_triangle(part, keys, stop), False
    tensors = (given.pop(name) for name in ("query", "key", "value"))
    return part.emit(callee(part.node), *tensors, **given)


def _rows_of_triangle(part: PartCall, keys: fx.Node, stop: calls.Size) -> fx.Node:
    """Write which keys come no later than each query of the part."""
    device = meta.value(operand(part.node)).device
    rows = part.emit(aten.arange.start, part.start, stop, device=device)
    columns = part.emit(aten.arange.default, keys, device=device)
    return part.emit(aten.le.Tensor, columns, part.emit(aten.unsqueeze.default, rows, 1))


def _ring_attention(ring: PartCall) -> fx.Node:
    """Attend with a part of the queries to keys and values as they come by; the mask has the rows of the part."""
    given = ring.given
    tensors = (given.get(name) for name in ("query", "key", "value", "attn_mask", "query_places", "key_places"))
    layout = list(ring.devices), list(ring.sizes), list(ring.travelling[1])
    return ring.fused("ring_attention", *tensors, *layout, given["is_causal"], given["scale"])


PRODUCTS: tuple[Rule, ...] = (
    *lines("... k, o k, +o? -> ... o", "linear", linear="each"),
    *lines("m k, k n -> m n", "mm", linear="each"),
    *lines("b m k, b k n -> b m n", "bmm", linear="each"),
    *lines("m k, k -> m", "mv", linear="each"),
    *lines("k, k -> ", "dot", "vdot", linear="each"),
    *lines("m, n -> m n", "outer", "ger", linear="each"),
    *lines("... i, ... j, o i j, +o? -> ... o", "bilinear", linear="each"),
    *lines("... p [m], ... r [m] -> ... p r", "cdist"),
    *rules_for_ops(matmul, "matmul"),
    *rules_for_ops(_product_plus_tensor, "addmm", "baddbmm", "addmv"),
    *rules_for_ops(_added_over_batch, "addbmm"),
    *rules_for_ops(_added_outer, "addr"),
    *rules_for_ops(_inner, "inner"),
    *rules_for_ops(_contracted, "tensordot"),
    *rules_for_ops(einsum, "einsum"),
    *rules_for_ops(
        _scaled_dot_product,
        "scaled_dot_product_attention",
        traits=OpTraits(placed=_causal_attention, ring=_ring_attention),
    ),
    *rules_for_ops(_in_sequences, "hetu.sequence_attention.default", traits=OpTraits(ring=_ring_attention)),
    *rules_for_ops(_sequence_places, "hetu.sequence_places.default"),
)


LinearSets = tuple[frozenset[int], ...]


def _leading_batch_dims(call: Call, given: Sequence[int], made: Sequence[int], linear: LinearSets = ()) -> Factoring:
    """Work on the last dims, so many of each operand and result, which stay whole; dims before them are batch."""
    shapes = [operand.shape for operand in call.operands]
    counts = [*given, *[0] * (len(shapes) - len(given))]
    leads = [_lead(shape, count) for shape, count in zip(shapes, counts, strict=True)]
    batch = fresh_dims(broadcast_shape(leads), "b")
    operands = tuple(_of_batch(s, c, batch, f"a{i}_") for i, (s, c) in enumerate(zip(shapes, counts, strict=True)))
    results = tuple(_of_batch(s, c, batch, f"r{i}_") for i, (s, c) in enumerate(zip(call.results, made, strict=True)))
    return Factoring(operands, results, whole=factor_names((*operands, *results)) - names(batch), linear=linear)


def _lead(shape: Shape, count: int) -> Shape:
    return shape[: max(len(shape) - count, 0)]


def _of_batch(shape: Shape, count: int, batch: Dims, prefix: str) -> Dims:
    lead = _lead(shape, count)
    return (*broadcast(lead, batch), *fresh_dims(shape, prefix)[len(lead) :])


def _solved(call: Call) -> Factoring:
    """Solve for the right-hand sides, which are matrices, or vectors where a batch of these fits; linear in them."""
    matrix, side = (operand.shape for operand in call.operands[:2])
    is_vector = len(side) == 1 or (len(side) == len(matrix) - 1 and side == matrix[:-1])
    count = 1 if is_vector else 2
    return _leading_batch_dims(call, (2, count), (count, *[0] * (len(call.results) - 1)), (frozenset({1}),))


def _crossed(call: Call) -> Factoring:
    """Multiply vectors of three along a dim, which stays whole; by default the first of size 3.

    Then a part of a dim before it may be no other dim of size 3: these stay whole, too.
    """
    target, shape = fresh_dims(call.results[0]), call.results[0]
    given = call.arguments.get("dim")
    dim = next(i for i, size in enumerate(shape) if size == integer(3)) if given is None else given % len(shape)
    operands = tuple(broadcast(operand.shape, target) for operand in call.operands)
    stays = range(dim + 1) if given is None else [dim]
    return Factoring(operands, (target,), whole=names(target, stays), linear=EACH)


def _dotted(call: Call) -> Factoring:
    """Multiply vectors along a dim, which is summed."""
    full = fresh_dims(broadcast_shape([operand.shape for operand in call.operands]))
    dim = call.dim(rank=len(full))
    operands = tuple(broadcast(operand.shape, full) for operand in call.operands)
    return Factoring(operands, (tuple(dims for i, dims in enumerate(full) if i != dim),), linear=EACH)


def _normed(call: Call) -> Factoring:
    """Measure vectors or matrices along dims, which stay whole: all of them where none is given."""
    return reduce_dims(call, whole=True)


def _renormed(call: Call) -> Factoring:
    """Shorten what is too long along one dim; that dim passes, all others stay whole."""
    dims = fresh_dims(call.operands[0].shape)
    return Factoring((dims,), (dims,), whole=names(dims) - names(dims, [call.dim()]))


def _traced(call: Call) -> Factoring:
    """Add up a diagonal; both dims stay whole."""
    factoring = reduce_dims(replace(call, arguments={**call.arguments, "dim": None}), linear=True)
    return replace(factoring, whole=factor_names(factoring.operands))


LINEAR_ALGEBRA: tuple[Rule, ...] = (
    *rules_for_ops(
        _leading_batch_dims,
        *("linalg_inv", "inverse", "matrix_exp", "linalg_matrix_exp", "linalg_cholesky", "cholesky"),
        *("cholesky_inverse", "linalg_matrix_power", "matrix_power", "pinverse", "linalg_pinv"),
        *("linalg_pinv.atol_rtol_float", "linalg_pinv.atol_rtol_tensor", "linalg_pinv.rcond_tensor"),
        given=(2,),
        made=(2,),
    ),
    *rules_for_ops(_leading_batch_dims, "linalg_inv_ex", "linalg_cholesky_ex", given=(2,), made=(2, 0)),
    *rules_for_ops(_leading_batch_dims, "linalg_det", "det", "logdet", "linalg_cond", given=(2,), made=(0,)),
    *rules_for_ops(_leading_batch_dims, "linalg_slogdet", "slogdet", given=(2,), made=(0, 0)),
    *rules_for_ops(_leading_batch_dims, "linalg_svdvals", "linalg_eigvals", "linalg_eigvalsh", given=(2,), made=(1,)),
    *rules_for_ops(_leading_batch_dims, "linalg_eigh", "linalg_eig", given=(2,), made=(1, 2)),
    *rules_for_ops(_leading_batch_dims, "linalg_svd", "svd", given=(2,), made=(2, 1, 2)),
    *rules_for_ops(_leading_batch_dims, "linalg_qr", given=(2,), made=(2, 2)),
    *rules_for_ops(_leading_batch_dims, "linalg_lu", given=(2,), made=(2, 2, 2)),
    *rules_for_ops(_leading_batch_dims, "linalg_lu_factor", given=(2,), made=(2, 1)),
    *rules_for_ops(_leading_batch_dims, "linalg_lu_factor_ex", given=(2,), made=(2, 1, 0)),
    *rules_for_ops(_leading_batch_dims, "linalg_householder_product", given=(2, 1), made=(2,)),
    *rules_for_ops(_leading_batch_dims, "linalg_solve_triangular", given=(2, 2), made=(2,), linear=(frozenset({1}),)),
    *rules_for_ops(_leading_batch_dims, "cholesky_solve", given=(2, 2), made=(2,), linear=(frozenset({0}),)),
    *rules_for_ops(_leading_batch_dims, "linalg_lu_solve", given=(2, 1, 2), made=(2,), linear=(frozenset({2}),)),
    *rules_for_ops(_leading_batch_dims, "lu_solve", given=(2, 2, 1), made=(2,), linear=(frozenset({0}),)),
    *rules_for_ops(_solved, "linalg_solve", "linalg_solve_ex"),
    *rules_for_ops(_crossed, "cross", "linalg_cross"),
    *rules_for_ops(_dotted, "linalg_vecdot"),
    *rules_for_ops(_normed, "linalg_norm", "linalg_norm.ord_str", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    *rules_for_ops(_renormed, "renorm"),
    *rules_for_ops(_traced, "trace"),
)


def _convolved(call: Call, *, transposed: bool = False) -> Factoring:
    """Convolve: with groups, channels are (group, channel) and the groups pass; transposed, inputs come first.

    Input channels whose number depends on the batch are whole: of none, which a replica may have, no op convolves.
    """
    shape, weight, result = call.operands[0].shape, call.operands[1].shape, call.results[0]
    at = len(shape) - len(weight) + 1  # 0 without a batch dim
    groups = integer(call.integer("groups"))
    if shape[at].over(groups) is None or result[at].over(groups) is None:
        return _convolved_whole(call, at)
    group, k, sizes = group_factors(shape[at], groups, "g", "k")
    _, o, more = group_factors(result[at], groups, "g", "o")
    kernel, image, new = fresh_dims(weight, "w")[2:], fresh_dims(shape, "x"), fresh_dims(result, "y")
    is_transposed = transposed or bool(call.arguments.get("transposed"))
    first, second = ((*group, *k), o) if is_transposed else ((*group, *o), k)
    bias = [((*group, *o),)] if len(call.operands) == 3 else []
    operands = (replace_dims(image, {at: (*group, *k)}), (first, second, *kernel), *bias)
    target: Dims = (*image[:at], (*group, *o), *new[at + 1 :])
    extra = frozenset({2} if bias else ())
    symbolic: Dims = (k,) if shape[at].number is None else ()
    return Factoring(
        operands,
        (target,),
        sizes | more,
        factor_names(((*kernel, *image[at + 1 :], *new[at + 1 :]), symbolic)),
        linear=(frozenset({0}) | extra, frozenset({1}) | extra),
        additive=extra,
        literals=(LiteralSize(call.at("groups"), group),) if group else (),
    )


def _convolved_whole(call: Call, at: int) -> Factoring:
    """Convolve a number of channels that only the run tells to be one of groups: the batch passes alone."""
    image, weight, *bias = (
        fresh_dims(operand.shape, prefix) for operand, prefix in zip(call.operands, "xwb", strict=False)
    )
    made: Dims = (*image[:at], *fresh_dims(call.results[0], "y")[at:])
    extra = frozenset({2} if bias else ())
    linear = frozenset({0}) | extra, frozenset({1}) | extra
    whole = factor_names((image[at:], made[at:], weight, *bias))
    return Factoring((image, weight, *bias), (made,), whole=whole, linear=linear, additive=extra)


def _pooled(call: Call, *, linear: bool = False) -> Factoring:
    """Pool or interpolate over space, which stays whole; batch and channels pass through."""
    space = 3 if "3d" in call.op else 1 if "1d" in call.op else 2
    return change_dims(call, range(call.rank - space, call.rank), linear)


def _sampled(call: Call) -> Factoring:
    """Read space at given places: batch and channels pass, the places too; linear in what is read."""
    image, grid = (fresh_dims(operand.shape, prefix) for operand, prefix in zip(call.operands, "xg", strict=True))
    batch = image[0]
    operands = (image, (batch, *grid[1:]))
    whole = names(image, range(2, len(image))) | names(grid, [len(grid) - 1])
    return Factoring(operands, ((*image[:2], *grid[1:-1]),), whole=whole, linear=(frozenset({0}),))


def _in_columns(call: Call, *, folds: bool) -> Factoring:
    """Write windows of space as columns, (channels, place in the window), or add these up; space stays whole.

    Relates (batch, channels, height, width) to (batch, channels x places, windows); the batch may be absent.
    """
    space, flat = call.operands[0].shape, call.results[0]
    if folds:
        space, flat = flat, space
    at = len(space) - 3
    channel, place, sizes = group_factors(flat[at], space[at], "c", "p")
    image = replace_dims(fresh_dims(space, "x"), {at: channel})
    columns = (*image[:at], (*channel, *place), *fresh_dims(flat, "y")[at + 1 :])
    whole = names(image, (at + 1, at + 2)) | names(columns, (at + 1,)) | frozenset(place)
    given, made = (columns, image) if folds else (image, columns)
    return Factoring((given,), (made,), sizes, whole, linear=(frozenset({0}),))


def _shuffle_channels(call: Call) -> Factoring:
    """Move channels into space or back: both stay whole, batch passes through."""
    return change_dims(call, range(call.rank - 3, call.rank))


def _recurred(call: Call, once: bool = False) -> Factoring:
    """Run gated cells over time, or `once`: weights, steps and hidden states are whole, rows pass."""
    at, of_states = 0 if once or call.arguments.get("batch_first") else 1, 0 if once else 1
    operands = tuple(
        _with_rows(fresh_dims(operand.shape, f"a{i}_"), {"input": at, "hx": of_states}.get(operand.argument))
        for i, operand in enumerate(call.operands)
    )
    shapes = enumerate(call.results)
    results = tuple(_with_rows(fresh_dims(shape, f"r{i}_"), of_states if i else at) for i, shape in shapes)
    every = factor_names((*operands, *results))
    draws = bool(call.arguments.get("train")) and call.arguments.get("dropout", 0.0) != 0
    return Factoring(operands, results, whole=every - {"rows"}, random=draws)


def _with_rows(dims: Dims, at: int | None) -> Dims:
    return dims if at is None or not dims[at] else replace_dims(dims, {at: ("rows",)})


POOLED_LINEARLY = """
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    upsample_nearest2d upsample_nearest2d.vec upsample_bilinear2d upsample_bilinear2d.vec upsample_bicubic2d
    upsample_bicubic2d.vec upsample_nearest1d upsample_nearest1d.vec upsample_linear1d upsample_linear1d.vec
    upsample_nearest3d upsample_nearest3d.vec upsample_trilinear3d upsample_trilinear3d.vec
    _upsample_bilinear2d_aa _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
""".split()

CONVOLUTIONS: tuple[Rule, ...] = (
    *rules_for_ops(_convolved, "conv1d", "conv2d", "conv3d", "convolution"),
    *rules_for_ops(_convolved, "conv1d.padding", "conv2d.padding", "conv3d.padding"),
    *rules_for_ops(_convolved, "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", transposed=True),
    *rules_for_ops(_pooled, "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "max_pool2d_with_indices"),
    *rules_for_ops(_pooled, "adaptive_max_pool1d", "adaptive_max_pool3d"),
    *rules_for_ops(_sampled, "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
    *rules_for_ops(_pooled, *POOLED_LINEARLY, linear=True),
    *rules_for_ops(_shuffle_channels, "pixel_shuffle", "pixel_unshuffle"),
    *rules_for_ops(_in_columns, "im2col", folds=False),
    *rules_for_ops(_in_columns, "col2im", folds=True),
    *rules_for_ops(_recurred, "gru.input", "lstm.input", "rnn_tanh.input", "rnn_relu.input"),
    *rules_for_ops(_recurred, "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell", once=True),
)

RULES: tuple[Rule, ...] = (*PRODUCTS, *LINEAR_ALGEBRA, *CONVOLUTIONS)
