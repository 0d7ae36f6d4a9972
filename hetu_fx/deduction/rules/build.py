"""How a rule is said: one einsum-like line for an op whose dims do not depend on its arguments, or a builder.

    "... k, o k, +o? -> ... o"        linear: k is summed, the optional bias is added once
    "n c [h w], [o] c -> n [o]"       brackets: these factors stay whole
    "(g a) b, g -> g a b"             parentheses: a dim that is a product, outermost first

Operands stand for the tensor arguments of the op in order. `...` are leading dims, shared by all that have
it and broadcast from the right; `1` is a dim of size 1; `?` after an operand: may be absent; `+` before it:
added after the summation. A factor that no result has is summed away.

A builder is a function from `Call` to `Factoring`; what follows the language are the parts that builders are made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.forms import NO_TRAITS, OpTraits
from hetu_fx.deduction.rules.rule import Dim, Dims, Factoring, LiteralSize, Rule, factor_names
from hetu_fx.deduction.rules.size import Size, integer, product
from hetu_fx.errors import RuleError

NAME = r"[A-Za-z_][A-Za-z_0-9]*"
TOKEN = re.compile(rf"\.\.\.|{NAME}|1|[\[\]]|\(\s*{NAME}(?:\s+{NAME})*\s*\)|\s+")
ELLIPSIS: Dim = ("...",)
Linear = str | Collection[Collection[int]]


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

    def factor(self, call: Call, linear: Linear) -> Factoring:
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
            whole=whole & factor_names((*operands, *results)),  # a dim of size 1 has no factor
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


def _linear_sets(linear: Linear, count: int, additive: frozenset[int]) -> tuple[frozenset[int], ...]:
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


FIRST: tuple[frozenset[int], ...] = (frozenset({0}),)
EACH: tuple[frozenset[int], ...] = (frozenset({0}), frozenset({1}))


def from_line(op: str, text: str, linear: Linear = "none") -> Rule:
    """Return the rule that a line says; RuleError if the line is malformed."""
    line = parse_line(text)
    return Rule(op, lambda call: line.factor(call, linear), text)


def lines(text: str, *ops: str, linear: Linear = "none") -> tuple[Rule, ...]:
    """Return one rule per op, all by the same line; ops are named without "aten." and ".default"."""
    return tuple(from_line(full_name(op), text, linear) for op in ops)


def rules_for_ops(
    build: Callable[..., Factoring], *ops: str, traits: OpTraits = NO_TRAITS, **options: object
) -> tuple[Rule, ...]:
    """Return one rule per op, all by the same builder, whose docstring is the rule's text, with the same options."""
    return tuple(Rule(full_name(op), partial(build, **options), title(build), traits) for op in ops)


def title(build: Callable[..., Factoring]) -> str:
    """Return what a builder says of itself in one line."""
    return (build.__doc__ or build.__name__).strip().splitlines()[0]


def full_name(op: str) -> str:
    """Return "aten.name.overload" for "name" or "name.overload"; full names unchanged."""
    shortened = {0: f"aten.{op}.default", 1: f"aten.{op}"}
    return shortened.get(op.count("."), op)


def fresh_dims(shape: Shape, prefix: str = "d") -> Dims:
    """Name the dims of a shape d0, d1, ...; a dim of size 1 has no factor."""
    return tuple(factor_dim(f"{prefix}{i}", size) for i, size in enumerate(shape))


def factor_dim(name: str, size: Size) -> Dim:
    """Return the dim of one factor; a dim of size 1 has none."""
    return () if size.number == 1 else (name,)


def group_factors(size: Size, groups: Size, outer: str, inner: str) -> tuple[Dim, Dim, dict[str, Size]]:
    """Return the factors of a dim of a size that consists of so many groups, outer and inner, and their sizes."""
    rest = size.over(groups)
    assert rest is not None, "an op requires groups of equal size"
    return factor_dim(outer, groups), factor_dim(inner, rest), {outer: groups, inner: rest}


def broadcast(shape: Shape, target: Sequence[Dim]) -> Dims:
    """Return the dims of an operand that is broadcast to dims with these factors."""
    offset = len(target) - len(shape)
    return tuple(() if size.number == 1 else target[i + offset] for i, size in enumerate(shape))


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """Return the shape that tensors of these shapes are broadcast to together."""
    rank = max(map(len, shapes))
    columns = [[shape[i - rank] for shape in shapes if len(shape) >= rank - i] for i in range(rank)]
    return tuple(next((size for size in column if size.number != 1), integer(1)) for column in columns)


def replace_dims(dims: Dims, changes: dict[int, Dim]) -> Dims:
    """Return dims with some replaced."""
    return tuple(changes.get(i, dim) for i, dim in enumerate(dims))


def names(dims: Dims, which: Sequence[int] | None = None) -> frozenset[str]:
    """Return the factor names of some of the dims, of all if it is not said which; a number has none in its dim 0."""
    chosen = range(len(dims)) if which is None or not dims else which
    return frozenset(name for i in chosen for name in dims[i])


def keep_dims(call: Call, whole: Sequence[int] = (), linear: bool = False) -> Factoring:
    """Keep all dims of one operand, some of them whole."""
    dims = fresh_dims(call.operands[0].shape)
    return Factoring((dims,), (dims,) * len(call.results), whole=names(dims, whole), linear=FIRST if linear else ())


def kept_along(call: Call, argument: str = "dim", linear: bool = False) -> Factoring:
    """Keep all dims of one operand, whole the ones that an argument names."""
    return keep_dims(call, call.dims(argument), linear)


def change_dims(call: Call, dims: Sequence[int], linear: bool = True) -> Factoring:
    """Make other dims of some dims of one operand; on both sides these stay whole."""
    source = fresh_dims(call.operands[0].shape)
    fresh = [fresh_dims(shape, "o") for shape in call.results]
    results = tuple(replace_dims(source, {dim: new[dim] for dim in dims}) for new in fresh)
    whole = names(source, dims).union(*(names(new, dims) for new in fresh))
    return Factoring((source,), results, whole=whole, linear=FIRST if linear else ())


def literals(call: Call, argument: str, dims: Dims) -> tuple[LiteralSize, ...]:
    """Return the elements of a list-of-sizes argument as the sizes of the dims, aligned at the end."""
    given = call.arguments.get(argument)
    count = len(given) if isinstance(given, list | tuple) else 0
    offset = count - len(dims)
    return tuple(
        LiteralSize(call.at(argument, offset + i), dim) for i, dim in enumerate(dims) if dim and offset + i >= 0
    )


def opaque(call: Call) -> Factoring:
    """Return the factoring in which every dim is whole and related to no other."""
    operands = tuple(fresh_dims(op.shape, f"a{i}_") for i, op in enumerate(call.operands))
    results = tuple(fresh_dims(shape, f"r{i}_") for i, shape in enumerate(call.results))
    return Factoring(operands, results, whole=factor_names((*operands, *results)))
