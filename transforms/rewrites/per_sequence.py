"""Let attention in packed rows cost what its sequences cost: each attends by itself, not the row under a mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from hetu_fx.base.dtypes import is_real
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, operand
from hetu_fx.graph.edit import Rewrite, insert, replace
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.masks import Indices, LessEqual, MaskPredicate, SameElement, Term, find_masks
from hetu_fx.graph.positions import Affine, AtMostZero, align_affine
from hetu_fx.graph.simplify import ATTENTION, grouped_heads
from hetu_fx.transforms.rewrites import sequence_ops  # noqa: F401 - registers hetu::sequence_attention

aten = torch.ops.aten
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
