"""Attention in runs of one sequence is attention to the whole row under the mask that keeps sequences apart."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hetu_fx.comm_ops.ops.attention_runs import AttentionRun, attend, gradients, neighbour_runs, token_places
from hetu_fx.comm_ops.ops.ring_attention_block import KeyValueBlock, Places

attention = torch.nn.functional.scaled_dot_product_attention
ROWS = [((5, 1, 3), (2, 7)), ((9,), (9,)), ((4, 4, 1), (4, 4, 1)), ((1,) * 9, (3, 3, 3))]


def numbers(rows: tuple[tuple[int, ...], ...]) -> Tensor:
    """Number the tokens of rows by sequences of these lengths."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


def tensors(heads: int, rows: int, length: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((rows, 6, length, 8), (rows, heads, length, 8), (rows, heads, length, 8))
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def sees(number: Tensor, is_causal: bool) -> Tensor:
    same = number[:, :, None] == number[:, None]
    return (same & torch.ones(same.shape[1:], dtype=torch.bool).tril() if is_causal else same)[:, None]


def test_places_say_where_a_sequence_begins_and_where_a_token_is() -> None:
    assert token_places(torch.tensor([[7, 7, 9, 9, 9]])).tolist() == [[[0, 0], [0, 1], [2, 2], [2, 3], [2, 4]]]
    assert token_places(torch.empty(2, 0)).shape == (2, 0, 2)


def test_a_row_in_which_numbers_fall_counts_as_one_sequence() -> None:
    """The third token is of the first one's sequence again."""
    assert token_places(torch.tensor([[0, 1, 0], [0, 0, 1]]))[..., 0].tolist() == [[0, 0, 0], [0, 0, 2]]


def test_neighbouring_rows_with_the_same_sequences_run_together() -> None:
    places = token_places(numbers(((2, 1), (2, 1), (3,))))
    found = list(neighbour_runs(Places(places, places), is_causal=True))
    assert found == [
        (slice(0, 2), (AttentionRun((0, 2), (0, 2), 0), AttentionRun((2, 1), (2, 1), None))),
        (slice(2, 3), (AttentionRun((0, 3), (0, 3), 0),)),
    ]


def test_a_part_of_the_queries_sees_of_its_sequences_what_came_before() -> None:
    """Sequences of 3 and 5 tokens; the queries 2 to 5 are two with the first and three of the second."""
    places = token_places(numbers(((3, 5),)))
    (rows, runs), *_ = neighbour_runs(Places(places[:, 2:6], places), is_causal=True)
    assert (rows, runs) == (slice(0, 1), (AttentionRun((0, 1), (0, 3), None), AttentionRun((1, 3), (3, 3), 0)))
    (_, after), *_ = neighbour_runs(Places(places[:, 2:6], places[:, 6:]), is_causal=True)
    assert after == ()


def test_queries_in_the_middle_of_a_sequence_see_what_came_before_without_a_mask() -> None:
    places = token_places(numbers(((8,),)))
    (_, runs), *_ = neighbour_runs(Places(places[:, 3:6], places), is_causal=True)
    assert runs == (AttentionRun((0, 3), (0, 3), None), AttentionRun((0, 3), (3, 3), 0, continues=True))
    (_, runs), *_ = neighbour_runs(Places(places[:, 3:6], places[:, 1:5]), is_causal=True)
    assert runs == (AttentionRun((0, 3), (0, 2), None), AttentionRun((0, 3), (2, 2), 0, continues=True))


@pytest.mark.parametrize("heads", [6, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_values_and_gradients_are_those_under_the_mask(
    rows: tuple[tuple[int, ...], ...], is_causal: bool, heads: int
) -> None:
    given, number = tensors(heads, len(rows), 9), numbers(rows)
    places = token_places(number)
    part = KeyValueBlock(given[1], given[2], None, 0 if is_causal else None, 0.3, Places(places, places))
    wanted = attention(*given, sees(number, is_causal), scale=0.3, enable_gqa=True)
    gradient = torch.randn_like(wanted)
    out, lse = attend(given[0], part)
    found = out, *gradients(gradient, given[0], part, out, lse)
    for one, other in zip(found, (wanted, *torch.autograd.grad(wanted, given, gradient)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["chosen", "added", "padding", "one row"])
def test_a_mask_that_is_kept_is_cut_with_the_runs(kind: str) -> None:
    torch.manual_seed(1)
    number = numbers(((5, 1, 3), (2, 7)))
    same = sees(number, is_causal=False)
    diagonal = torch.eye(9, dtype=torch.bool)
    mask = {
        "chosen": same & ((torch.rand(2, 1, 9, 9) < 0.6) | diagonal),
        "added": torch.randn(2, 6, 9, 9, dtype=torch.float64).masked_fill(~same, -torch.inf),
        "padding": torch.rand(2, 1, 1, 9) < 0.7,
        "one row": torch.rand(9) < 0.7,
    }[kind]
    given, places = tensors(3, 2, 9), token_places(number)
    part = KeyValueBlock(given[1], given[2], mask, None, None, Places(places, places))
    all_of_it = mask & same if kind in ("padding", "one row") else mask
    wanted = attention(*given, all_of_it, enable_gqa=True)
    gradient = torch.randn_like(wanted)
    out, lse = attend(given[0], part)
    found = out, *gradients(gradient, given[0], part, out, lse)
    for one, other in zip(found, (wanted, *torch.autograd.grad(wanted, given, gradient)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cuts", [(0, 4, 9), (0, 1, 1, 9), (0, 6, 8, 9)])
def test_parts_of_queries_with_all_keys_are_rows_of_the_whole(cuts: tuple[int, ...]) -> None:
    number = numbers(((5, 1, 3), (2, 7)))
    given, places = tensors(3, 2, 9), token_places(number)
    wanted = attention(*given, sees(number, is_causal=True), enable_gqa=True)
    gradient, totals = torch.randn_like(wanted), [torch.zeros_like(x) for x in given]
    for first, stop in pairwise(cuts):
        part = KeyValueBlock(given[1], given[2], offset=0, places=Places(places[:, first:stop], places))
        query, own = given[0][:, :, first:stop], gradient[:, :, first:stop]
        out, lse = attend(query, part)
        torch.testing.assert_close(out, wanted[:, :, first:stop], rtol=1e-12, atol=1e-12)
        dq, dk, dv = gradients(own, query, part, out, lse)
        totals[0][:, :, first:stop] = dq
        totals[1] += dk
        totals[2] += dv
    for one, other in zip(totals, torch.autograd.grad(wanted, given, gradient), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strided", range(4))
def test_channels_need_not_lie_one_after_another(strided: int) -> None:
    """torch's kernel reads them as if they did."""
    places = token_places(numbers(((5, 1, 3), (2, 7))))
    given = [x.detach() for x in tensors(3, 2, 9)]
    given.append(torch.randn_like(given[0]))

    def found(given: list[Tensor]) -> tuple[Tensor, ...]:
        part = KeyValueBlock(given[1], given[2], offset=0, places=Places(places, places))
        out, lse = attend(given[0], part)
        return out, *gradients(given[3], given[0], part, out, lse)

    wanted = found(given)
    given[strided] = given[strided].transpose(-1, -2).contiguous().transpose(-1, -2)
    for one, other in zip(found(given), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
