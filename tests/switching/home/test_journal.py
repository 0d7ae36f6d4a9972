"""Copies of pieces are known as such as long as they are there."""

from __future__ import annotations

import gc

import pytest
import torch

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.switching.home.journal import Journal
from hetu_fx.switching.home.layout import home_layout

JOURNAL = Journal()
LAYOUT = home_layout(Annotation.on((0,)), (2,), 0, 1)


def test_a_copy_knows_its_source_and_when_it_was_made() -> None:
    source = torch.ones(2)
    source.mul_(2)
    piece = source.clone()
    JOURNAL.note_copy(source, source, piece, LAYOUT)
    source.mul_(2)
    found = JOURNAL.copy_at(piece)
    assert found is not None
    assert found.source() is source
    assert found.writes == 1
    assert any(one is piece for one, _ in JOURNAL.copies())


def test_a_tensor_is_no_copy_of_itself() -> None:
    source = torch.ones(2)
    JOURNAL.note_copy(source, source, source, LAYOUT)
    assert JOURNAL.copy_at(source) is None


def test_copies_that_are_gone_are_not_known() -> None:
    source = torch.ones(2)
    gone = source.clone()
    JOURNAL.note_copy(source, source, gone, LAYOUT)
    number = id(gone)
    del gone
    gc.collect()
    assert number not in [id(piece) for piece, _ in JOURNAL.copies()]


@pytest.mark.parametrize(
    ("dtype", "writes", "outlives"), [(torch.float32, 0, True), (torch.float16, 0, False), (torch.float32, 1, False)]
)
def test_a_copy_of_a_copy_outlives_the_one_between_if_it_is_as_the_first(
    dtype: torch.dtype, writes: int, outlives: bool
) -> None:
    source = torch.ones(2)
    between = source.to(dtype, copy=True)
    JOURNAL.note_copy(source, source, between, LAYOUT)
    for _ in range(writes):
        between.mul_(2)
    last = between.double()
    JOURNAL.note_copy(between, between, last, LAYOUT)
    found = JOURNAL.copy_at(last)
    assert found is not None
    assert found.source() is (source if outlives else between)
    del between
    gc.collect()
    assert found.source() is (source if outlives else None)
