"""Sizes of what a leaf makes are told from a few calls, and written as texts that say the same."""

from __future__ import annotations

import pytest
import torch

from hetu_fx.graph.leaves.result_shapes import Form, SizeFormula, found_size, read_form

GIVEN = [[(5, 4), (3,)], [(6, 4), (3,)], [(8, 4), (3,)], [(5, 8), (3,)], [(5, 16), (3,)]]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([7, 7, 7, 7, 7], "7"),
        ([5, 6, 8, 5, 5], "1*0.0"),
        ([10, 12, 16, 10, 10], "2*0.0"),
        ([4, 4, 4, 8, 16], "1*0.1"),
        ([2, 2, 2, 4, 8], "1*0.1/2"),
        ([6, 7, 9, 6, 6], "1*0.0+1"),
        ([3, 4, 6, 3, 3], "1*0.0-2"),
        ([20, 24, 32, 40, 80], "1*0.0*0.1"),
        ([25, 36, 64, 25, 25], "1*0.0*0.0"),
    ],
)
def test_a_size_is_told_by_how_it_follows_others(sizes: list[int], text: str) -> None:
    found = found_size(sizes, GIVEN)
    assert str(found) == text
    assert SizeFormula.read(text) == found
    assert [SizeFormula.read(text).of(shapes) for shapes in GIVEN] == sizes


@pytest.mark.parametrize("sizes", [[5, 6, 9, 5, 5], [5, 6, 8, 5, 6], [1, 2, 1, 2, 1]])
def test_a_size_that_follows_nothing_is_not_told(sizes: list[int]) -> None:
    assert found_size(sizes, GIVEN) is None


def test_a_form_is_read_from_its_text() -> None:
    form = Form(torch.float64, (SizeFormula(((0, 0),)), SizeFormula(times=3)))
    assert str(form) == "float64 1*0.0 3"
    assert read_form(str(form)) == form
    assert read_form("int64").shape([]) == []
