"""Products of matrices, and attention, which is two of them.

The contracted factor of a product is summed, rows, columns and batch dims pass through. In attention batch, heads,
queries and value channels do; keys and their channels stay whole.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from hetu_fx.deduction.rules.build import EACH, broadcast, factor_dim, fresh_dims, lines, replace_dims, rules_for_ops
from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.forms import OpTraits, PartCall
from hetu_fx.deduction.rules.rule import Dim, Dims, Factoring, Rule, factor_names
from hetu_fx.deduction.rules.size import ONE, Size
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


RULES: tuple[Rule, ...] = (
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
