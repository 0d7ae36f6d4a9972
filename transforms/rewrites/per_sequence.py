"""Let attention in packed rows cost what its sequences cost: each attends by itself, not the row under a mask.

What an attention mask lets through, read from the arithmetic that makes it: a conjunction of terms. A mask of packed
rows is true where two tokens have the same number, and perhaps where a key is no later than its query. A mask of
numbers is minus infinity elsewhere. Terms hold for every size and every batch; what cannot be read is left out, and the
mask is then no more than implied by its terms.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from hetu_fx.base.dtypes import is_real
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, arguments, operand
from hetu_fx.graph.edit import Rewrite, insert, replace
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.positions import MOVEMENTS, Affine, AtMostZero, Known, align_affine, movement, positional_values
from hetu_fx.graph.simplify import ATTENTION, grouped_heads
from hetu_fx.transforms.rewrites import sequence_ops  # noqa: F401 - registers hetu::sequence_attention

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
    return dataclasses.replace(found, terms=frozenset(map(of_term, found.terms)))


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
    return dataclasses.replace(found, is_negated=not found.is_negated)


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
    return _both(dataclasses.replace(mask, is_negated=False), call.sees(call.given("self")))


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


PLACES, PER_SEQUENCE = torch.ops.hetu.sequence_places.default, torch.ops.hetu.sequence_attention.default

_RANK = 4  # of (rows, heads, tokens, channels)


@dataclass(frozen=True)
class PerSequence:
    """Attend to each sequence of a packed row by itself.

    Requires: a captured graph; attention that drops weights out is written out.
    Ensures: attention whose mask lets no token see one with another number attends within runs of equal numbers, and
        its mask is gone if it says no more than that, or that, and that no key is later than its query. Numbers that
        fall along a row leave this row whole, if the mask is still there. Masks of which this cannot be read from how
        they are made are left as they are.

        %mask = eq(%row_number, %column_number)
        %y = scaled_dot_product_attention(%q, %k, %v, %mask)
            ->  %places = hetu.sequence_places(%number)
                %y = hetu.sequence_attention(%q, %k, %v, None, %places, %places, False, None, False)
    """

    name: ClassVar[str] = "per_sequence"

    def __call__(self, graph: Graph) -> Graph:
        if not graph.graph.find_nodes(op="call_function", target=ATTENTION):
            return graph
        return _SequenceRewrite(graph).run()


class MaskMeaning(NamedTuple):
    """What a mask means: which tokens' numbers it compares, and whether that is all, or all with causality."""

    numbers: fx.Node
    is_all: bool
    is_causal: bool


class _SequenceRewrite(Rewrite):
    """Rewrites attention under masks of packed rows."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._masks: Mapping[fx.Node, MaskPredicate] = find_masks(self.graph.graph)
        self._places: dict[fx.Node, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        """Rewrite attention whose mask keeps sequences apart."""
        if node.target is not ATTENTION or argument(node, "dropout_p") or argument(node, "is_causal"):
            return
        mask = argument(node, "attn_mask")
        meaning = _meaning(node, mask, self._masks[mask]) if mask in self._masks else None
        if meaning is None:
            return
        query, (key, value) = operand(node), grouped_heads(node) or (operand(node, 1), operand(node, 2))
        places = self._places_of(meaning.numbers)
        heads = [meta.hints(given)[1] for given in (query, key, value)]
        given = query, key, value, None if meaning.is_all else mask, places, places
        how = meaning.is_all and meaning.is_causal, argument(node, "scale"), heads[1:] != heads[:1] * 2
        replace(node, insert(node, PER_SEQUENCE, *given, *how))

    def _places_of(self, numbers: fx.Node) -> fx.Node:
        if numbers not in self._places:
            self._places[numbers] = insert(numbers.next, PLACES, numbers)
        return self._places[numbers]


def _meaning(node: fx.Node, mask: fx.Node, sees: MaskPredicate) -> MaskMeaning | None:
    """Return what a mask means for an attention; None where it is not known to keep sequences apart."""
    shapes = [[meta.expression(size) for size in meta.shape(given)] for given in node.args[:3]]  # type: ignore[arg-type]
    query, key, value = shapes
    is_plain = all(len(shape) == _RANK for shape in shapes) and query[0] == key[0] == value[0] and query[2] == key[2]
    if not is_plain or len(meta.shape(mask)) > _RANK:
        return None
    row, column = _indices(node, -2), _indices(node, -1)
    terms = {_aligned(term, node) for term in sees.terms}
    found = [term.source for term in terms if isinstance(term, SameElement) and term.pair == {row, column}]
    numbers = next((one for one in found if _is_of_tokens(one, query[0], query[2])), None)
    if numbers is None:
        return None
    others = terms - {SameElement(numbers, frozenset({row, column}))}
    is_causal = all(_is_causal(term, numbers, row, column) for term in others)
    is_all = sees.exact and is_causal and _never_falls(numbers)
    return MaskMeaning(numbers, is_all, bool(others))


def _is_of_tokens(numbers: fx.Node, rows: Any, tokens: Any) -> bool:
    return [meta.expression(size) for size in meta.shape(numbers)] == [rows, tokens]


def _scores(node: fx.Node) -> tuple[meta.Size, ...]:
    """Return the shape of an attention's scores."""
    query, key = meta.shape(operand(node)), meta.shape(operand(node, 1))
    return (*query[:-1], key[-2])


def _indices(node: fx.Node, dim: int) -> Indices:
    """Return where the number of a score's query (dim -2) or key (-1) stands in numbers of (rows, tokens)."""
    slopes = (tuple(int(i == at % _RANK) for i in range(_RANK)) for at in (0, dim))
    return tuple(align_affine(Affine(0, one), _scores(node)) for one in slopes)


def _aligned(term: Term, node: fx.Node) -> Term:
    """Return a term of a mask as one of the scores that it is broadcast to."""

    def of(indices: Indices) -> Indices:
        return tuple(align_affine(one, _scores(node)) for one in indices)

    match term:
        case AtMostZero(bound):
            return AtMostZero(align_affine(bound, _scores(node)))
        case SameElement(source, pair):
            return SameElement(source, frozenset(map(of, pair)))
        case LessEqual(source, first, second):
            return LessEqual(source, of(first), of(second))


def _is_causal(term: Term, numbers: fx.Node, row: Indices, column: Indices) -> bool:
    """Tell whether a term says, of two tokens of one sequence, that the key is no later than the query."""
    match term:
        case AtMostZero(bound):
            return bound == column[1].plus(row[1], -1)
        case LessEqual(positions, first, second):
            return (first, second) == (column, row) and _numbers_runs(numbers, positions)
    return False


def _never_falls(numbers: fx.Node) -> bool:
    """Tell whether numbers count something along the row."""
    if numbers.target is not aten.cumsum.default or argument(numbers, "dim") % 2 != 1:
        return False
    return meta.dtype(operand(numbers)) is torch.bool and not is_real(meta.dtype(numbers))


def _numbers_runs(numbers: fx.Node, positions: fx.Node) -> bool:
    """Tell whether numbers count along the row where positions do not go on by one, so that in a run they do."""
    breaks = operand(numbers) if _never_falls(numbers) else None
    if breaks is None or breaks.target is not aten.ne.Scalar or argument(breaks, "other") != 1:
        return False
    steps = operand(breaks)
    if steps.target is not aten.diff.default or operand(steps) is not positions:
        return False
    return argument(steps, "n") == 1 and argument(steps, "dim") % 2 == 1 and argument(steps, "append") is None
