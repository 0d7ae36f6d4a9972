"""What is read of a mask is what the mask computes, for values and sizes the graph has never seen."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hetu_fx.graph.positions import Affine, AtMostZero
from hetu_fx.transforms.rewrites.per_sequence import Indices, LessEqual, MaskPredicate, SameElement, Term, find_masks

Mask = Callable[[Tensor], Tensor]
LEAST = -math.inf


def rows_and_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(x.shape[1]).unsqueeze(1), torch.arange(x.shape[1])


def same(x: Tensor) -> Tensor:
    return x[:, None, :, None] == x[:, None, None]


def by_index(x: Tensor) -> Tensor:
    """Compare as transformers' masks do: by indices of rows, queries and keys."""
    rows = torch.arange(x.shape[0])[:, None, None, None]
    query, key = torch.arange(x.shape[1])[None, None, :, None], torch.arange(x.shape[1])[None, None, None]
    return (x[rows, query] == x[rows, key]) & (key <= query)


def not_later(x: Tensor) -> Tensor:
    return same(x) & (x[:, None, None] <= x[:, None, :, None])


def no_less(x: Tensor) -> Tensor:
    return same(x).logical_and(x[:, None, :, None] >= x[:, None, None])


def transposed(x: Tensor) -> Tensor:
    return same(x).transpose(-1, -2).expand(-1, 3, -1, -1)


def windowed(x: Tensor) -> Tensor:
    rows, columns = rows_and_columns(x)
    return same(x) & (columns <= rows) & (rows - columns < 3)


def with_unknown(x: Tensor) -> Tensor:
    return same(x) & (x[:, None, None] > 1)


def chosen(x: Tensor) -> Tensor:
    return torch.where(same(x), torch.zeros(x.shape[1], x.shape[1]), torch.full((), LEAST))


def chosen_bias(x: Tensor) -> Tensor:
    return torch.where(same(x), x[:, None, None].float(), torch.full((), LEAST))


def filled(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1], x.shape[1]).masked_fill(~same(x), LEAST)


def biased(x: Tensor) -> Tensor:
    return filled(x) + x[:, None, None].float()


KNOWN: list[tuple[Mask, int, bool]] = [  # how many terms are read, and whether they are all
    (same, 1, True),
    (by_index, 2, True),
    (not_later, 2, True),
    (no_less, 2, True),
    (transposed, 1, True),
    (windowed, 3, True),
    (with_unknown, 1, False),
    (chosen, 1, True),
    (chosen_bias, 1, False),
    (filled, 1, True),
    (biased, 1, False),
]


def either(x: Tensor) -> Tensor:
    return same(x) | (x[:, None, None] > 1)


def finite(x: Tensor) -> Tensor:
    return torch.where(same(x), torch.zeros(()), torch.full((), -1e30))


def subtracted(x: Tensor) -> Tensor:
    return torch.sub(torch.zeros(()), filled(x))


def of_two_tensors(x: Tensor) -> Tensor:
    return x[:, None, :, None] == (x + 1)[:, None, None]


def different(x: Tensor) -> Tensor:
    return ~same(x)


class Evaluated(fx.Interpreter):
    """Runs a graph and compares what is known of every mask with its values."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.known = find_masks(module.graph)
        self.seen: list[MaskPredicate] = []

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if n in self.known:
            assert isinstance(value, Tensor)
            self._check(value, self.known[n])
        return value

    def _check(self, value: Tensor, sees: MaskPredicate) -> None:
        holds = torch.ones(value.shape, dtype=torch.bool)
        for term in sees.terms:
            holds &= self._holds(term, value.shape)
        through = value if value.dtype is torch.bool else value > LEAST
        assert not (through & ~holds).any()
        if sees.exact:
            assert torch.equal(through, holds)
            assert value.dtype is torch.bool or (value[through] == 0).all()
        self.seen.append(sees)

    def _holds(self, term: Term, shape: torch.Size) -> Tensor:
        match term:
            case AtMostZero(bound):
                return at(bound, shape) <= 0
            case SameElement(source, pair):
                first, *others = (self._element(source, one, shape) for one in pair)
                return first == others[0] if others else torch.ones(shape, dtype=torch.bool)
            case LessEqual(source, first, second):
                return self._element(source, first, shape) <= self._element(source, second, shape)

    def _element(self, source: fx.Node, indices: Indices, shape: torch.Size) -> Tensor:
        value: Tensor = self.env[source]
        return value[tuple(at(index, shape) for index in indices)]


def at(value: Affine, shape: torch.Size) -> Tensor:
    """Evaluate an affine function of the indices at every place of a shape."""
    total = torch.full(tuple(shape), value.constant)
    for dim, slope in enumerate(value.slopes):
        places = torch.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
        total = total + slope * places
    return total


def read(mask: Mask) -> MaskPredicate | None:
    """Return what is known of a mask, once all that is known was checked at two sizes."""
    module = make_fx(mask, tracing_mode="symbolic", pre_dispatch=True)(torch.arange(12).view(2, 6))
    for rows, length in ((2, 7), (3, 5)):
        running = Evaluated(module)
        running.run(torch.randint(0, 3, (rows, length), generator=torch.Generator().manual_seed(0)))
    (output,) = module.graph.find_nodes(op="output")
    return find_masks(module.graph).get(output.args[0])


@pytest.mark.parametrize(("mask", "terms", "is_all"), KNOWN, ids=lambda case: getattr(case, "__name__", str(case)))
def test_masks_let_through_what_their_terms_say(mask: Mask, terms: int, is_all: bool) -> None:
    found = read(mask)
    assert found is not None
    assert (len(found.terms), found.exact) == (terms, is_all)


@pytest.mark.parametrize(
    "mask", [either, finite, subtracted, of_two_tensors, different], ids=lambda mask: mask.__name__
)
def test_nothing_is_known_of_masks_that_are_made_otherwise(mask: Mask) -> None:
    assert read(mask) is None
