"""Products of matrices: the contracted factor is summed, rows, columns and batch dims pass through."""

from __future__ import annotations

from hetu_fx.deduction.rules.build import aligned, built, dims_of, lines
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.rule import Dims, Factoring, Rule
from hetu_fx.errors import RuleError

EACH = (frozenset({0}), frozenset({1}))
BIAS_FIRST = (frozenset({0, 1}), frozenset({0, 2}))


def matmul(call: Call) -> Factoring:
    """Multiply matrices or vectors of any rank; leading dims are broadcast."""
    a, b = (operand.shape for operand in call.operands)
    result = call.results[0]
    names = list(dims_of(result, "b"))
    rows, columns = min(len(a) - 1, 1), min(len(b) - 1, 1)
    batch = result[: len(result) - rows - columns]
    ends = {"m": rows, "n": columns}
    tail = tuple((name,) for name, present in ends.items() if present)
    names[len(batch) :] = [() if s.number == 1 else t for s, t in zip(result[len(batch) :], tail, strict=True)]
    k = () if a[-1].number == 1 else ("k",)
    left = (*aligned(a[:-2], batch, "b"), *names[len(batch) : len(batch) + rows], k)
    right = (*aligned(b[:-2], batch, "b"), k, *names[len(names) - columns :][:columns])
    return Factoring((left, right), (tuple(names),), linear=EACH)


def added(call: Call) -> Factoring:
    """Multiply two matrices (batched or not) and add a tensor that is broadcast to the result, once."""
    bias, a, _ = (operand.shape for operand in call.operands)
    result = call.results[0]
    names = dims_of(result)
    k = () if a[-1].number == 1 else ("k",)
    batch = names[: len(a) - 2]
    right: Dims = (*batch, k, *names[len(a) - 1 :])
    left: Dims = (*names[: len(a) - 1], k)
    operands = (aligned(bias, result), left, right)
    return Factoring(operands, (names,), linear=BIAS_FIRST, additive=frozenset({0}))


def einsum(call: Call) -> Factoring:
    """Read the factors off the equation; letters without an ellipsis only."""
    equation = str(call.arguments["equation"]).replace(" ", "")
    if "." in equation:
        raise RuleError(f"an einsum with an ellipsis has no rule: {equation!r} ({call.where})")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if "->" not in equation:
        letters = left.replace(",", "")
        right = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    operands = tuple(_letters(call, i, term) for i, term in enumerate(terms))
    result = tuple(() if size.number == 1 else (c,) for c, size in zip(right, call.results[0], strict=True))
    return Factoring(operands, (result,), linear=tuple(frozenset({i}) for i in range(len(terms))))


def _letters(call: Call, operand: int, term: str) -> Dims:
    shape = call.operands[operand].shape
    return tuple(() if size.number == 1 else (letter,) for letter, size in zip(term, shape, strict=True))


RULES: tuple[Rule, ...] = (
    *lines("... k, o k, +o? -> ... o", "linear", linear="each"),
    *lines("m k, k n -> m n", "mm", linear="each"),
    *lines("b m k, b k n -> b m n", "bmm", linear="each"),
    *lines("m k, k -> m", "mv", linear="each"),
    *lines("k, k -> ", "dot", "vdot", linear="each"),
    *lines("m, n -> m n", "outer", "ger", linear="each"),
    *lines("... i, ... j, o i j, +o? -> ... o", "bilinear", linear="each"),
    *lines("... p [m], ... r [m] -> ... p r", "cdist"),
    *built(matmul, "matmul"),
    *built(added, "addmm", "baddbmm", "addmv"),
    *built(einsum, "einsum"),
)
