"""The rule language: one einsum-like line for an op whose dims do not depend on its arguments.

    "... k, o k, +o? -> ... o"        linear: k is summed, the optional bias is added once
    "n c [h w], [o] c -> n [o]"       brackets: these factors stay whole
    "(g a) b, g -> g a b"             parentheses: a dim that is a product, outermost first

Operands stand for the tensor arguments of the op in order. `...` are leading dims, shared by all that have
it and broadcast from the right; `1` is a dim of size 1; `?` after an operand: may be absent; `+` before it:
added after the summation. A factor that no result has is summed away.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.rule import Dim, Dims, Factoring, names_in
from hetu_fx.deduction.rules.size import Size, product
from hetu_fx.errors import RuleError

NAME = r"[A-Za-z_][A-Za-z_0-9]*"
TOKEN = re.compile(rf"\.\.\.|{NAME}|1|[\[\]]|\(\s*{NAME}(?:\s+{NAME})*\s*\)|\s+")
ELLIPSIS: Dim = ("...",)


@dataclass(frozen=True, slots=True)
class Pattern:
    """The dims of one operand or result: tuples of factor names, ELLIPSIS for the leading dims."""

    dims: Dims
    whole: frozenset[str]
    optional: bool = False
    additive: bool = False


@dataclass(frozen=True, slots=True)
class RuleLine:
    """A parsed rule line; every way of being wrong is refused by `parse_line`."""

    text: str
    operands: tuple[Pattern, ...]
    results: tuple[Pattern, ...]

    def factor(self, call: Call, linear: str | Collection[Collection[int]]) -> Factoring:
        """Return the factors of a call; `linear` as in `rule`."""
        patterns = self._present(call)
        shapes = [operand.shape for operand in call.operands]
        sizes = _sizes([*patterns, *self.results], [*shapes, *call.results], self.text)
        additive = frozenset(i for i, pattern in enumerate(patterns) if pattern.additive)
        operands = tuple(_bind(p, s, sizes, self.text) for p, s in zip(patterns, shapes, strict=True))
        results = tuple(_bind(p, s, sizes, self.text) for p, s in zip(self.results, call.results, strict=True))
        whole = frozenset[str]().union(*(pattern.whole for pattern in (*patterns, *self.results)))
        return Factoring(
            operands=operands,
            results=results,
            sizes=sizes,
            whole=whole & names_in((*operands, *results)),  # a dim of size 1 has no factor
            linear=_linear_sets(linear, len(patterns), additive),
            additive=additive,
        )

    def _present(self, call: Call) -> list[Pattern]:
        """Return the patterns of the operands that the call has, in the order of its arguments."""
        given = [operand.argument for operand in call.operands]
        pairs = list(zip(self.operands, call.tensor_names, strict=False))
        present = [pattern for pattern, name in pairs if name in given]
        absent = [pattern for pattern, name in pairs if name not in given]
        misfit = len(present) != len(given) or not all(pattern.optional for pattern in absent)
        if misfit or len(call.tensor_names) < len(self.operands) or len(call.results) != len(self.results):
            raise RuleError(
                f"{call.op} is called with tensors for {given} and gives {len(call.results)} results, which "
                f"does not fit its rule {self.text!r} ({call.where})"
            )
        return present


def _linear_sets(
    linear: str | Collection[Collection[int]], count: int, additive: frozenset[int]
) -> tuple[frozenset[int], ...]:
    match linear:
        case "none":
            return ()
        case "all":
            return (frozenset(range(count)),)
        case "each":
            factors = [i for i in range(count) if i not in additive]
            return tuple(frozenset({i, *additive}) for i in factors)
        case str():
            raise RuleError(f"linear must be 'none', 'all', 'each' or sets of operand positions, not {linear!r}")
        case _:
            return tuple(frozenset(group) for group in linear if all(i < count for i in group))


def parse_line(text: str) -> RuleLine:
    """Parse a rule line; RuleError names the part that is malformed."""
    if text.count("->") != 1:
        raise RuleError(f"a rule line has one '->' between operands and results: {text!r}")
    left, right = text.split("->")
    operands = tuple(_parse_pattern(part, text) for part in left.split(",")) if left.strip() else ()
    results = tuple(_parse_pattern(part, text) for part in right.split(","))
    if any(pattern.optional or pattern.additive for pattern in results):
        raise RuleError(f"'?' and '+' belong to operands, not to results: {text!r}")
    return RuleLine(text, operands, results)


def _parse_pattern(part: str, text: str) -> Pattern:
    body = part.strip()
    additive, optional = body.startswith("+"), body.endswith("?")
    body = body.removeprefix("+").removesuffix("?")
    if TOKEN.sub("", body):
        raise RuleError(f"cannot read {TOKEN.sub('', body)!r} in {part.strip()!r} of rule {text!r}")
    dims, whole = _parse_dims([token for token in TOKEN.findall(body) if not token.isspace()], text)
    if dims.count(ELLIPSIS) > 1 or (ELLIPSIS in dims and dims[0] != ELLIPSIS):
        raise RuleError(f"'...' stands once, before all other dims: {part.strip()!r} of rule {text!r}")
    return Pattern(dims, whole, optional, additive)


def _parse_dims(tokens: Sequence[str], text: str) -> tuple[Dims, frozenset[str]]:
    dims: list[Dim] = []
    whole: set[str] = set()
    inside = False
    for token in tokens:
        if token in "[]":
            inside = _toggled(inside, token == "[", text)
            continue
        names = () if token == "1" else tuple(token.strip("()").split())
        dims.append(names)
        whole.update(names if inside else ())
    if inside:
        raise RuleError(f"'[' is not closed in rule {text!r}")
    return tuple(dims), frozenset(whole)


def _toggled(is_open: bool, opens: bool, text: str) -> bool:
    if is_open == opens:
        raise RuleError(f"'[' and ']' do not alternate in rule {text!r}")
    return opens


def _bind(pattern: Pattern, shape: Shape, sizes: Mapping[str, Size], text: str) -> Dims:
    """Return the factor names of each dim; a dim of size 1 is broadcast and has none."""
    named = [dim for dim in pattern.dims if dim != ELLIPSIS]
    leading = len(shape) - len(named)
    if leading < 0 or (leading and ELLIPSIS not in pattern.dims):
        raise RuleError(f"an operand of shape ({', '.join(map(str, shape))}) does not fit rule {text!r}")
    front = tuple((f"...{leading - i}",) if shape[i].number != 1 else () for i in range(leading))
    back = tuple(() if size.number == 1 else dim for dim, size in zip(named, shape[leading:], strict=True))
    return front + back


def _sizes(patterns: Sequence[Pattern], shapes: Sequence[Shape], text: str) -> dict[str, Size]:
    """Return the sizes of the factors in products, solved from the dims in which all but one are known."""
    known: dict[str, Size] = {}
    products: list[tuple[Dim, Size]] = []
    for pattern, shape in zip(patterns, shapes, strict=True):
        named = [dim for dim in pattern.dims if dim != ELLIPSIS]
        for dim, size in zip(reversed(named), reversed(shape), strict=False):
            if len(dim) == 1 and size.number != 1:
                known[dim[0]] = size
            elif len(dim) > 1:
                products.append((dim, size))
    for dim, size in products * 2:
        unknown = [name for name in dim if name not in known]
        rest = size.over(product(known[name] for name in dim if name in known))
        if len(unknown) == 1 and rest is not None:
            known[unknown[0]] = rest
    for dim, size in products:
        if any(name not in known for name in dim):
            raise RuleError(f"the sizes in the product {dim} of size {size} do not follow from rule {text!r}")
    return known
