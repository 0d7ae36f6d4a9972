"""Helpers that the rule files share: rules from lines, names for the dims of a shape."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.forms import NO_TRAITS, Traits
from hetu_fx.deduction.rules.line import parse_line
from hetu_fx.deduction.rules.rule import NOTHING, Builder, Dim, Dims, Factoring, LiteralSize, Rule
from hetu_fx.deduction.rules.size import Size

Linear = str | Collection[Collection[int]]
FIRST: tuple[frozenset[int], ...] = (frozenset({0}),)


def from_line(op: str, text: str, linear: Linear = "none") -> Rule:
    """Return the rule that a line says; RuleError if the line is malformed."""
    line = parse_line(text)
    return Rule(op, lambda call: line.factor(call, linear), text)


def lines(text: str, *ops: str, linear: Linear = "none") -> tuple[Rule, ...]:
    """Return one rule per op, all by the same line; ops are named without "aten." and ".default"."""
    return tuple(from_line(full_name(op), text, linear) for op in ops)


def built(build: Builder, *ops: str, traits: Traits = NO_TRAITS) -> tuple[Rule, ...]:
    """Return one rule per op, all by the same builder, whose docstring is the rule's text."""
    text = (build.__doc__ or build.__name__).strip().splitlines()[0]
    return tuple(Rule(full_name(op), build, text, traits) for op in ops)


def full_name(op: str) -> str:
    """Return "aten.name.overload" for "name" or "name.overload"; full names unchanged."""
    match op.count("."):
        case 0:
            return f"aten.{op}.default"
        case 1:
            return f"aten.{op}"
        case _:
            return op


def dims_of(shape: Shape, prefix: str = "d") -> Dims:
    """Name the dims of a shape d0, d1, ...; a dim of size 1 has no factor."""
    return tuple(() if size.number == 1 else (f"{prefix}{i}",) for i, size in enumerate(shape))


def named(name: str, size: Size) -> Dim:
    """Return the dim of one factor; a dim of size 1 has none."""
    return () if size.number == 1 else (name,)


def broadcast(shape: Shape, target: Sequence[Dim]) -> Dims:
    """Return the dims of an operand that is broadcast to dims with these factors."""
    offset = len(target) - len(shape)
    return tuple(() if size.number == 1 else target[i + offset] for i, size in enumerate(shape))


def aligned(shape: Shape, target: Shape, prefix: str = "d") -> Dims:
    """Name the dims of an operand that is broadcast to `target`, as `dims_of(target, prefix)` names them."""
    offset = len(target) - len(shape)
    return tuple(() if size.number == 1 else (f"{prefix}{i + offset}",) for i, size in enumerate(shape))


def replaced(dims: Dims, changes: dict[int, Dim]) -> Dims:
    """Return dims with some replaced."""
    return tuple(changes.get(i, dim) for i, dim in enumerate(dims))


def names(dims: Dims, which: Sequence[int]) -> frozenset[str]:
    """Return the factor names of some of the dims."""
    return frozenset(name for i in which for name in dims[i])


def kept(call: Call, whole: Sequence[int] = (), linear: bool = False) -> Factoring:
    """Return the factoring of a unary op that keeps all dims, some of them whole."""
    dims = dims_of(call.operands[0].shape)
    results = tuple(dims for _ in call.results)
    return Factoring((dims,), results, whole=names(dims, whole), linear=FIRST if linear else ())


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
    operands = tuple(dims_of(op.shape, f"a{i}_") for i, op in enumerate(call.operands))
    results = tuple(dims_of(shape, f"r{i}_") for i, shape in enumerate(call.results))
    every = frozenset(name for dims in (*operands, *results) for dim in dims for name in dim)
    return Factoring(operands, results, whole=every | NOTHING)
