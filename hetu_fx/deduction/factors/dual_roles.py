"""Ops in which a class plays several parts, cut in one of them: queries and keys of one sequence.

A class that stands in several dims of an op cannot be cut in all of them at once: every query needs every key. But
each query needs only itself, so that the class may be cut in the dim of the queries alone, with all keys in reach.
Where a tensor has such a class twice (scores, masks), it is the first of its dims that is cut, in every op alike.

    scores = matmul(q, k^T): "h s c, h c s -> h s s" is seen as "h s c, h c s' -> h s s'", s' whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hetu_fx.deduction.factors.factors import ClassDim, ClassDims, FactorClass, OpFactors, SizeArg
from hetu_fx.deduction.rules.rule import Dims, Factoring


def elsewhere(factor: FactorClass) -> FactorClass:
    """Return a class that stands for `factor` where it is not the first; no class of a graph equals it."""
    return replace(factor, id=-1 - factor.id)


def original(factor: FactorClass) -> FactorClass:
    """Return the class of the graph that a class is, or stands for."""
    return elsewhere(factor) if factor.id < 0 else factor


def taken_apart(
    op: OpFactors, factoring: Factoring, parts: Mapping[str, ClassDim], misfits: frozenset[FactorClass]
) -> Mapping[FactorClass, OpFactors]:
    """Return, by class that the op keeps whole but could cut where it comes first in its result, the op seen so.

    Args:
        op: the op as it is for classes that are cut wherever they stand.
        factoring: what its rule says, in names.
        parts: the classes that each name stands for.
        misfits: classes that the op's operands disagree on.
    """
    found: dict[FactorClass, OpFactors] = {}
    for factor in op.whole - misfits:
        name = _leading_name(factor, op, factoring, parts)
        if name is not None:
            found[factor] = _seen(op, factoring, parts, factor, name)
    return found


def _leading_name(
    factor: FactorClass, op: OpFactors, factoring: Factoring, parts: Mapping[str, ClassDim]
) -> str | None:
    """Return the name under which the class comes first in results and, if at all, in operands; None if it cannot."""
    having = [name for name, classes in parts.items() if factor in classes]
    firsts = {next((n for n in _names(dims) if n in having), None) for dims in factoring.results}
    name = firsts.pop() if len(firsts) == 1 else None
    if name is None or name in factoring.whole | factoring.sharded | factoring.pinned:
        return None
    if name in factoring.placed and len(parts[name]) > 1:  # a part of one of several is no range of positions
        return None
    for position, dims in enumerate(factoring.operands):
        if position in factoring.unread:
            continue
        names = [n for n in _names(dims) if n in having]
        if name in names[1:] or _classes(dims, parts) != op.operands[position].dims:
            return None
    return name


def _names(dims: Dims) -> Iterator[str]:
    return (name for dim in dims for name in dim)


def _classes(dims: Dims, parts: Mapping[str, ClassDim]) -> ClassDims:
    return tuple(tuple(cls for name in dim for cls in parts[name]) for dim in dims)


def _seen(
    op: OpFactors, factoring: Factoring, parts: Mapping[str, ClassDim], factor: FactorClass, name: str
) -> OpFactors:
    """Return the op as it is where a class is cut under one name alone: under others its stand-in is what stays."""
    put = {factor: elsewhere(factor)}
    apart = {n: c if n == name else tuple(put.get(cls, cls) for cls in c) for n, c in parts.items()}
    pairs = enumerate(zip(op.operands, factoring.operands, strict=True))
    return replace(
        op,
        operands=tuple(o if i in op.unread else replace(o, dims=_classes(dims, apart)) for i, (o, dims) in pairs),
        results=tuple(_classes(dims, apart) for dims in factoring.results),
        whole=op.whole - {factor} | {elsewhere(factor)},
        size_args=tuple(SizeArg(lit.path, tuple(c for n in lit.names for c in apart[n])) for lit in factoring.literals),
        placed=frozenset({factor} if name in factoring.placed else ()),
    )
