"""Classes seen as two, one inside the other, so that two axes of devices can each cut one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count

from hetu_fx.deduction.factors.factors import ClassDims, FactorClass, FactorMap, OpFactors

Pairs = Mapping[FactorClass, tuple[FactorClass, FactorClass]]
"""Classes with the outer and the inner one that stand for them."""


def pairs_of(classes: Iterable[FactorClass], outer: int, factors: FactorMap) -> Pairs:
    """Return new classes, the outer ones of size `outer`, for each of these, whose size it divides."""
    found: dict[FactorClass, tuple[FactorClass, FactorClass]] = {}
    for number, factor in zip(count(len(factors.classes), 2), sorted(classes, key=lambda c: c.id), strict=False):
        assert factor.size is not None
        found[factor] = _numbered(number, outer), _numbered(number + 1, factor.size // outer)
    return found


def _numbered(number: int, size: int) -> FactorClass:
    return FactorClass(number, size, False, str(size), size)


def is_plain(factor: FactorClass, factors: FactorMap) -> bool:
    """Tell whether no op has a form of its own for where a class is cut, so that it can be seen as two."""
    special = (op for op in factors.ops if factor in op.classes and _is_special(factor, op))
    return factors.splittable(factor) and next(special, None) is None


def _is_special(factor: FactorClass, op: OpFactors) -> bool:
    return factor in op.sharded | op.placed | op.averaged or factor in op.apart or factor in op.travelling.values()


def refined(factors: FactorMap, pairs: Pairs) -> FactorMap:
    """Return the map with classes seen as pairs."""
    if not pairs:
        return factors

    def dims(given: ClassDims) -> ClassDims:
        return tuple(tuple(one for factor in dim for one in pairs.get(factor, (factor,))) for dim in given)

    def classes(given: Iterable[FactorClass]) -> frozenset[FactorClass]:
        return frozenset(one for factor in given for one in pairs.get(factor, (factor,)))

    def op(given: OpFactors) -> OpFactors:
        return replace(
            given,
            operands=tuple(replace(operand, dims=dims(operand.dims)) for operand in given.operands),
            results=tuple(map(dims, given.results)),
            reduced=classes(given.reduced),
            whole=classes(given.whole),
            size_args=tuple(replace(size, classes=dims((size.classes,))[0]) for size in given.size_args),
            apart={factor: op(seen) for factor, seen in given.apart.items()},
        )

    found = tuple(one for pair in pairs.values() for one in pair)
    return factors.seen((*factors.classes, *found), dims, op)
