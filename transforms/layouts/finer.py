"""Tensor parallel groups of more devices than a class has parts: what each part is cut in besides.

Grouped heads are the case: k key-value heads, each with r heads of queries. A group of k s devices cuts the key-value
heads in k, one each, and what stands inside of each in s: its heads of queries (the fine axis). Keys and values, which
lack those, are whole there: the s devices that share a key-value head make the same ones, and their gradients come out
as summands, as the rules say for any operand that lacks what its op is cut on. What else the group splits is seen as
(k, the rest), so that both axes cut it; what ops look across (a vocabulary) is cut in k alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count

from hetu_fx.deduction.factors.factors import ClassDims, FactorClass, FactorMap, OpFactors
from hetu_fx.errors import PlanError
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.plans.plan import Stage

Splits = frozenset[FactorClass]
Rivals = Callable[[Graph, FactorMap], Mapping[FactorClass, set[FactorClass]]]


@dataclass(frozen=True, eq=False)
class FinerCut:
    """What groups split on the tensor axis, in `ways` parts at most, and what on the fine one.

    `factors` has the classes that both cut as two.
    """

    factors: FactorMap
    ways: int
    coarse: Splits
    fine: Splits

    def ratios(self, stage: Stage) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ratios of both axes for a stage of more devices than `ways`.

        Raises:
            PlanError: they are no whole multiple, or those that share a part are not cut alike.
        """
        _, given = stage.axes
        inner = given[: len(given) // self.ways]
        if inner * self.ways != given:
            raise PlanError(
                f"stage on devices {list(stage.devices)} splits what has {self.ways} parts over {len(given)} devices "
                f"with ratios {list(given)}\nhint: give a multiple of {self.ways} devices, the same ratios to those "
                f"that share each part, or at most {self.ways} devices"
            )
        return (1,) * self.ways, inner


def finer_cut(graph: Graph, factors: FactorMap, classes: Splits, rivals: Rivals, widest: int) -> FinerCut | None:
    """Return how a group of `widest` devices cuts classes that have fewer parts; None where none does, or none can."""
    small = {c for c in classes if (c.size or 0) < widest}
    ways = {c.size for c in small}
    if len(ways) != 1:
        return None
    (size,) = ways
    assert size is not None
    beside = rivals(graph, factors)
    inner = {c: _inside(c, beside[c], widest // size, factors) for c in small}
    if None in inner.values():
        return None
    others = {c for c in classes - small if (c.size or 0) % size == 0 and (c.size or 0) >= widest}
    pairs = _pairs_of([c for c in others if is_plain(c, factors)], size, factors)
    coarse = (classes - pairs.keys()) | {outer for outer, _ in pairs.values()}
    fine = {c for c in inner.values() if c is not None} | {within for _, within in pairs.values()}
    return FinerCut(_refine_factors(factors, pairs), size, frozenset(coarse), frozenset(fine))


def _inside(factor: FactorClass, beside: set[FactorClass], parts: int, factors: FactorMap) -> FactorClass | None:
    """Return the class that stands between one and what is inside of both in a parameter, with as many parts to cut."""
    leaves = [leaf for leaf in factors.leaves if leaf.kind is LeafKind.PARAMETER]
    dims = [dim for leaf in leaves for dim in factors.dims(leaf.node) if factor in dim[:-2]]
    found = {dim[dim.index(factor) + 1] for dim in dims} & beside
    able = [c for c in found if (c.size or 0) >= parts and is_plain(c, factors) and _is_shared_out(c, factor, factors)]
    return min(able, key=lambda c: c.id, default=None)


def _is_shared_out(inner: FactorClass, factor: FactorClass, factors: FactorMap) -> bool:
    """Tell whether no op sums over the inner class but together with the outer one, as a projection of heads does."""
    return all(factor in op.reduced for op in factors.ops if inner in op.reduced)


Pairs = Mapping[FactorClass, tuple[FactorClass, FactorClass]]
"""Classes with the outer and the inner one that stand for them."""


def _pairs_of(classes: Iterable[FactorClass], outer: int, factors: FactorMap) -> Pairs:
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


def _refine_factors(factors: FactorMap, pairs: Pairs) -> FactorMap:
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
