"""Errors are relative to the norm; masks, shapes and what is not finite must be the same."""

from __future__ import annotations

import math

import pytest
import torch

from hetu_fx_align.difference import APART, EQUAL, difference, scale_of

REFERENCE = torch.tensor([3.0, 4.0])


def test_an_error_is_relative_to_the_norm_and_has_a_cosine() -> None:
    found = difference(REFERENCE * 1.01, REFERENCE)
    assert found.error == pytest.approx(0.01, rel=1e-5)
    assert found.cosine == pytest.approx(1.0)
    turned = difference(torch.tensor([-4.0, 3.0]), REFERENCE)
    assert (turned.error, turned.cosine) == (pytest.approx(math.sqrt(2)), pytest.approx(0.0))


@pytest.mark.parametrize(
    "made", [torch.ones(3), torch.tensor([3.0, math.inf]), torch.tensor([math.nan, 4.0])], ids=["shape", "inf", "nan"]
)
def test_other_shapes_and_what_is_not_finite_are_apart(made: torch.Tensor) -> None:
    assert difference(made, REFERENCE) == APART


def test_numbers_that_mask_are_no_part_of_the_norm_and_must_mask_too() -> None:
    masked = torch.tensor([3.0, -math.inf, -3.4e38])
    assert difference(masked, masked) == EQUAL
    assert difference(torch.tensor([3.0, -3e38, -math.inf]), masked).error == 0.0  # another number that masks
    assert difference(torch.tensor([3.0, 0.0, -3.4e38]), masked) == APART
    assert difference(torch.tensor([3.3, -math.inf, -3.4e38]), masked).error == pytest.approx(0.1, rel=1e-5)


def test_whole_numbers_and_truth_values_differ_by_their_share() -> None:
    assert difference(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])).error == 0.25
    assert difference(torch.tensor([True]), torch.tensor([True])) == EQUAL


def test_a_reference_of_zero_is_compared_with_what_is_made_beside_it() -> None:
    zero, rounding = torch.zeros(4), torch.full((4,), 1e-9)
    assert difference(rounding, zero) == APART
    assert difference(zero, zero) == EQUAL
    assert difference(rounding, zero, scale=1.0).error == pytest.approx(1e-9)


def test_scales_leave_masks_out() -> None:
    assert scale_of([torch.tensor([3.0, 3.0, -math.inf, 1e38]), torch.ones(2), torch.tensor([9])]) == pytest.approx(3)
