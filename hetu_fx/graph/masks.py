"""What an attention mask lets through, read from the arithmetic that makes it: a conjunction of terms.

A mask of packed rows is true where two tokens have the same number, and perhaps where a key is no later than its query.
A mask of numbers is minus infinity elsewhere. Terms hold for every size and every batch; what cannot be read is left
out, and the mask is then no more than implied by its terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from hetu_fx.base.dtypes import is_real
from hetu_fx.graph import meta
from hetu_fx.graph.calls import arguments
from hetu_fx.graph.positions import MOVEMENTS, Affine, AtMostZero, Known, align_affine, movement, positional_values

aten = torch.ops.aten
Indices = tuple[Affine, ...]


@dataclass(frozen=True, slots=True)
class Element:
    """The element of a tensor at indices that are affine functions of where it is read."""

    source: fx.Node
    indices: Indices


@dataclass(frozen=True, slots=True)
class SameElement:
    """Whether two elements of a tensor are equal."""

    source: fx.Node
    pair: frozenset[Indices]


@dataclass(frozen=True, slots=True)
class LessEqual:
    """Whether the element of a tensor at the `first` indices is no larger than that at the `second`."""

    source: fx.Node
    first: Indices
    second: Indices


Term = SameElement | LessEqual | AtMostZero


@dataclass(frozen=True, slots=True)
class MaskPredicate:
    """A mask that lets through only where all terms hold, exactly there if `exact` (numbers being 0 there).

    With `is_negated` it is true where the mask is not.
    """

    terms: frozenset[Term] = frozenset()
    exact: bool = False
    is_negated: bool = False


ReadMask = Element | MaskPredicate


@dataclass(frozen=True, slots=True)
class _MaskCall:
    """A call, what is known of elements that follow from their positions, and what has been read so far."""

    node: fx.Node
    positions: Known
    read: Mapping[fx.Node, ReadMask]

    def given(self, name: str) -> Any:
        return arguments(self.node)[name]

    def element(self, name: str) -> Element | None:
        """Return an operand as an element of a tensor: of itself, where nothing else is known."""
        node = self.given(name)
        if not isinstance(node, fx.Node) or not meta.is_tensor(node) or node in self.positions:
            return None
        found = self.read.get(node)
        return found if isinstance(found, Element) else None if found else _itself(node)

    def sees(self, item: object) -> MaskPredicate:
        """Return what an operand lets through; all that is not known."""
        if not isinstance(item, fx.Node):
            return MaskPredicate()
        found, place = self.read.get(item), self.positions.get(item)
        if isinstance(place, AtMostZero):
            return MaskPredicate(frozenset() if place.always else frozenset({place}), exact=True)
        return found if isinstance(found, MaskPredicate) else MaskPredicate(exact=_constant(item) == 0)


def _itself(node: fx.Node) -> Element:
    shape = meta.shape(node)
    slopes = (tuple(int(i == dim) for i in range(len(shape))) for dim in range(len(shape)))
    return Element(node, tuple(Affine(0, one) for one in slopes))


def _changed(found: ReadMask, change: Callable[[Affine], Affine]) -> ReadMask:
    """Change every affine function in what was read."""

    def of_term(term: Term) -> Term:
        match term:
            case AtMostZero(bound):
                return AtMostZero(change(bound))
            case SameElement(source, pair):
                return SameElement(source, frozenset(tuple(map(change, indices)) for indices in pair))
            case LessEqual(source, first, second):
                return LessEqual(source, tuple(map(change, first)), tuple(map(change, second)))

    if isinstance(found, Element):
        return Element(found.source, tuple(map(change, found.indices)))
    return replace(found, terms=frozenset(map(of_term, found.terms)))


def _operand(call: _MaskCall) -> ReadMask:
    """Return what the first operand is: a mask, or an element."""
    return call.element("self") or call.sees(call.given("self"))


def _moved(call: _MaskCall) -> ReadMask | None:
    change = movement(call.node)
    return None if change is None else _changed(_operand(call), change)


def _index(call: _MaskCall) -> ReadMask | None:
    """Read x[i, j, ...] with an index for every dim, all known and counting from 0."""
    found, indices = call.element("self"), call.given("indices")
    places = [call.positions.get(index) for index in indices]
    if found is None or len(indices) != len(meta.shape(call.given("self"))):
        return None
    known = [place for place in places if isinstance(place, Affine) and place.is_never_negative]
    if len(known) < len(indices):
        return None

    def moved(value: Affine) -> Affine:
        total = Affine(value.constant)
        for slope, place in zip(value.slopes, known, strict=True):
            total = total.plus(place, slope)
        return total

    return _changed(found, moved)


def _compared(call: _MaskCall, *, first: str, second: str) -> ReadMask | None:
    """Read whether an element is no larger than another one of the same tensor."""
    a, b = call.element(first), call.element(second)
    if a is None or b is None or a.source is not b.source:
        return None
    return MaskPredicate(frozenset({LessEqual(a.source, a.indices, b.indices)}), exact=True)


def _equal(call: _MaskCall) -> ReadMask | None:
    a, b = call.element("self"), call.element("other")
    if a is None or b is None or a.source is not b.source:
        return None
    return MaskPredicate(frozenset({SameElement(a.source, frozenset({a.indices, b.indices}))}), exact=True)


def _and(call: _MaskCall) -> ReadMask | None:
    return _both(call.sees(call.given("self")), call.sees(call.given("other")))


def _both(a: MaskPredicate, b: MaskPredicate) -> MaskPredicate | None:
    a, b = (MaskPredicate() if one.is_negated else one for one in (a, b))
    return MaskPredicate(a.terms | b.terms, a.exact and b.exact)


def _added(call: _MaskCall) -> ReadMask | None:
    """Read a sum of masks of numbers: minus infinity where one of them is."""
    return _and(call) if is_real(meta.dtype(call.node)) and call.given("alpha") == 1 else None


def _not(call: _MaskCall) -> ReadMask | None:
    found = call.sees(call.given("self"))
    return replace(found, is_negated=not found.is_negated)


def _chosen(call: _MaskCall) -> ReadMask | None:
    """Read where(mask, x, -inf)."""
    mask = call.sees(call.given("condition"))
    if mask.is_negated or _constant(call.given("other")) != -math.inf:
        return None
    return _both(mask, call.sees(call.given("self")))


def _filled(call: _MaskCall) -> ReadMask | None:
    """Read x.masked_fill(mask, -inf)."""
    mask = call.sees(call.given("mask"))
    if not mask.is_negated or _constant(call.given("value")) != -math.inf:
        return None
    return _both(replace(mask, is_negated=False), call.sees(call.given("self")))


def _constant(item: object) -> float | None:
    """Return the number that an operand is, or that fills it; None where that is not known."""
    if isinstance(item, fx.Node) and item.target in _ZEROS:
        return 0.0
    if isinstance(item, fx.Node) and item.target in _FILLED:
        given = arguments(item)
        item = given.get("fill_value", given.get("s"))
    return float(item) if isinstance(item, int | float) else None


_FILLED = frozenset({aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default})
_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})

Reader = Callable[[_MaskCall], ReadMask | None]
_ROWS: tuple[tuple[Reader, tuple[Any, ...]], ...] = (
    (_moved, tuple(MOVEMENTS)),
    (_index, (aten.index.Tensor,)),
    (_equal, (aten.eq.Tensor,)),
    (partial(_compared, first="self", second="other"), (aten.le.Tensor,)),
    (partial(_compared, first="other", second="self"), (aten.ge.Tensor,)),
    (_and, (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)),
    (_added, (aten.add.Tensor,)),
    (_not, (aten.bitwise_not.default, aten.logical_not.default)),
    (_chosen, (aten.where.self,)),
    (_filled, (aten.masked_fill.Scalar,)),
)
_READERS: Mapping[Any, Reader] = {op: reader for reader, ops in _ROWS for op in ops}


def find_masks(graph: fx.Graph) -> Mapping[fx.Node, MaskPredicate]:
    """Return the masks in a graph of which something is known."""
    positions, read = positional_values(graph), dict[fx.Node, ReadMask]()
    for node in graph.nodes:
        reader = _READERS.get(node.target) if node.op == "call_function" and meta.is_tensor(node) else None
        found = None if reader is None or node in positions else reader(_MaskCall(node, positions, read))
        if found is not None:
            read[node] = _changed(found, partial(align_affine, shape=meta.shape(node)))
    masks = {node: found for node, found in read.items() if isinstance(found, MaskPredicate)}
    return {node: found for node, found in masks.items() if found.terms and not found.is_negated}
