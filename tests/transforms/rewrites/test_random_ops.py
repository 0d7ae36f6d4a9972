"""Numbers come from counters: right rates, no correlation, and every part makes its part of the whole mask."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hetu_fx.deduction.rules.registry import find_rule
from hetu_fx.transforms.rewrites import random_ops
from hetu_fx.transforms.rewrites.random_ops import random_cut

hetu = torch.ops.hetu


def state(seed: int = 1, step: int = 0, row: int = 0) -> torch.Tensor:
    return torch.tensor([seed, step, row])


def drop(
    x: torch.Tensor, p: float = 0.3, row: int = 0, cut: Sequence[int] = (), rows: Sequence[int] = (0, 1, 1, 1)
) -> torch.Tensor:
    return hetu.dropout(x, p, state(row=row), 0, list(rows), list(cut))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_scale_are_right(p: float) -> None:
    y = drop(torch.ones(200, 1000), p)
    assert abs((y == 0).double().mean() - p) < 4 * (p * (1 - p) / y.numel()) ** 0.5
    assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))


def test_all_and_nothing() -> None:
    x = torch.randn(3, 4)
    assert not drop(x, 1.0).any()
    assert torch.equal(drop(x, 0.0), x)


@pytest.mark.parametrize("other", ["site", "step", "seed", "shifted_row", "shifted_column"])
def test_masks_of_different_draws_are_not_correlated(other: str) -> None:
    x = torch.ones(400, 500)
    first = hetu.dropout(x, 0.5, state(), 0, [0, 1, 1, 1], [])
    second = {
        "site": lambda: hetu.dropout(x, 0.5, state(), 1, [0, 1, 1, 1], []),
        "step": lambda: hetu.dropout(x, 0.5, state(step=1), 0, [0, 1, 1, 1], []),
        "seed": lambda: hetu.dropout(x, 0.5, state(seed=2), 0, [0, 1, 1, 1], []),
        "shifted_row": lambda: first.roll(1, 0),
        "shifted_column": lambda: first.roll(1, 1),
    }[other]()
    correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
    assert abs(correlation) < 4 / x.numel() ** 0.5


def test_rows_and_columns_have_the_right_rate_each() -> None:
    y = drop(torch.ones(500, 600), 0.5) == 0
    for dim in (0, 1):
        rates = y.double().mean(dim)
        assert abs(rates - 0.5).max() < 5 * 0.5 / y.shape[dim] ** 0.5


def test_parts_of_the_rows_make_their_part_of_the_mask() -> None:
    x = torch.randn(7, 5, 6)
    parts = [drop(part, row=row) for part, row in zip(x.split([3, 1, 3]), (0, 3, 4), strict=True)]
    assert torch.equal(torch.cat(parts), drop(x))


def test_rows_that_are_flattened_with_another_dim() -> None:
    x = torch.randn(7 * 5, 6)
    parts = [drop(part, row=row, rows=(0, 5, 5, 1)) for part, row in zip(x.split([15, 20]), (0, 3), strict=True)]
    assert torch.equal(torch.cat(parts), drop(x, rows=(0, 5, 5, 1)))


def test_rows_that_stand_inside_of_another_dim_that_is_flattened_with_them() -> None:
    x = torch.randn(3, 7, 5)
    whole = drop(x.reshape(-1), rows=(0, 15, 5, 1)).view(3, 7, 5)
    for first, count in ((0, 2), (2, 4), (6, 1)):
        part = drop(x[:, first : first + count].reshape(-1), row=first, rows=(0, 15, 5, 1))
        assert torch.equal(part.view(3, count, 5), whole[:, first : first + count])


def test_rows_inside_of_another_dim_that_is_cut() -> None:
    x = torch.randn(6, 7, 5)
    whole = drop(x.reshape(-1), rows=(0, 30, 5, 1)).view(6, 7, 5)
    local = x[2:5, 1:3].reshape(-1)
    part = drop(local, row=1, rows=(0, 30, 5, 1), cut=random_cut(0, 2, 3, 6, 10))
    assert torch.equal(part.view(3, 2, 5), whole[2:5, 1:3])


def test_rows_that_are_not_the_first_dim() -> None:
    x = torch.randn(4, 7, 6)
    parts = [drop(part, row=row, rows=(1, 1, 1, 1)) for part, row in zip(x.split([2, 5], 1), (0, 2), strict=True)]
    assert torch.equal(torch.cat(parts, 1), drop(x, rows=(1, 1, 1, 1)))


def test_parts_of_a_cut_factor_make_their_part_of_the_mask() -> None:
    x = torch.randn(3, 2 * 6 * 5)
    whole = drop(x).view(3, 2, 6, 5)
    for start, stop in ((0, 1), (1, 4), (4, 6)):
        local = x.view(3, 2, 6, 5)[:, :, start:stop].reshape(3, -1)
        part = drop(local, cut=random_cut(1, start, stop - start, 6, 5))
        assert torch.equal(part.view(3, 2, stop - start, 5), whole[:, :, start:stop])


def test_rows_and_heads_in_one_dim_cut_both_ways() -> None:
    x = torch.randn(4 * 6, 5)
    whole = drop(x, rows=(0, 6, 6, 1)).view(4, 6, 5)
    local = x.view(4, 6, 5)[1:3, 2:5].reshape(-1, 5)
    part = drop(local, row=1, rows=(0, 6, 6, 1), cut=random_cut(0, 2, 3, 6, 1))
    assert torch.equal(part.view(2, 3, 5), whole[1:3, 2:5])


def test_two_cut_dims() -> None:
    x = torch.randn(2, 6, 8)
    local = x[:, 1:3, 4:8].contiguous()
    part = drop(local, cut=random_cut(1, 1, 2, 6, 1) + random_cut(2, 4, 4, 8, 1))
    assert torch.equal(part, drop(x)[:, 1:3, 4:8])


def test_gradient_is_dropped_by_the_same_mask() -> None:
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    y = drop(x)
    y.sum().backward()
    assert torch.allclose(x.grad, (y != 0) / torch.tensor(0.7, dtype=torch.float64))
    assert torch.autograd.gradcheck(drop, (x,))


def test_memory_layout_is_kept_and_the_mask_does_not_depend_on_it() -> None:
    x = torch.randn(3, 4, 5).transpose(1, 2)
    assert drop(x).stride() == x.stride()
    assert torch.equal(drop(x), drop(x.contiguous()))


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (1,), (70_000,), (3, 70_000)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    assert drop(x).shape == x.shape
    assert hetu.uniform(x, state(), 0, [], []).shape == x.shape


def test_uniform_numbers_are_uniform() -> None:
    u = hetu.uniform(torch.empty(300, 1000, dtype=torch.float64), state(), 5, [0, 1, 1, 1], [])
    assert 0 <= u.min() < u.max() < 1
    counts = torch.histc(u, 20, 0, 1) / u.numel()
    assert abs(counts - 0.05).max() < 5 * (0.05 / u.numel()) ** 0.5
    assert abs(u.var() - 1 / 12) < 1e-3


def test_ops_are_well_formed() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    torch.library.opcheck(random_ops.dropout, (x, 0.3, state(), 0, [0, 1, 1, 1], []))
    torch.library.opcheck(random_ops.uniform, (x.detach(), state(), 0, [0, 1, 1, 1], []))


def test_rules_know_where_ops_that_draw_take_their_part() -> None:
    for op in (torch.ops.hetu.uniform.default, torch.ops.hetu.dropout.default):
        rule = find_rule(op)
        assert rule is not None
        assert rule.traits.counter_at is not None
        assert op._schema.arguments[rule.traits.counter_at].name == "cut"
