"""Rows are placed among those of all replicas and taken out again, each the other's adjoint."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from hetu_fx.transforms.rewrites import row_ops

LAYOUTS = [(0, 1, 1), (1, 2, 1), (1, 1, 3), (0, 2, 2)]


@pytest.mark.parametrize(("dim", "outer", "inner"), LAYOUTS)
def test_what_all_replicas_place_adds_up_to_the_whole_batch(dim: int, outer: int, inner: int) -> None:
    counts, total = (3, 0, 2), 5
    shape = [4, 4]
    shape[dim] = outer * total * inner
    whole = torch.randn(shape)
    states = [torch.tensor([0, 0, first]) for first in (0, 3, 3)]
    parts = [row_ops.own_rows(whole, s, n, dim, outer, inner) for s, n in zip(states, counts, strict=True)]
    assert [part.shape[dim] for part in parts] == [outer * n * inner for n in counts]
    placed = [row_ops.place_rows(p, s, total, dim, outer, inner) for p, s in zip(parts, states, strict=True)]
    assert torch.equal(sum(placed, torch.zeros(())), whole)


@pytest.mark.parametrize(("dim", "outer", "inner"), LAYOUTS)
def test_each_is_the_adjoint_of_the_other(dim: int, outer: int, inner: int) -> None:
    state, shape = torch.tensor([0, 0, 1]), [2, 2]
    shape[dim] = outer * 2 * inner
    own = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: row_ops.place_rows(x, state, 4, dim, outer, inner), (own,))
    shape[dim] = outer * 4 * inner
    whole = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: row_ops.own_rows(x, state, 2, dim, outer, inner), (whole,))
