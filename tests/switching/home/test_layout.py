"""Home layouts: every element is counted once, pieces are cut and put together exactly."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial, Split
from hetu_fx.annotations.local import index
from hetu_fx.errors import AnnotationError
from hetu_fx.switching.home.layout import HomeLayout, home_layout
from tests.oracles.annotation_samples import random_annotation

WORLD = 6
SHAPES = st.sampled_from([(12, 6), (24,), (4, 6, 3), (7, 5)])


def layouts(annotation: Annotation, shape: tuple[int, ...]) -> list[HomeLayout]:
    return [home_layout(annotation, shape, rank, WORLD) for rank in range(WORLD)]


@given(st.integers(0, 10**6), SHAPES)
def test_every_element_is_counted_on_exactly_one_rank(seed: int, shape: tuple[int, ...]) -> None:
    annotation = random_annotation(Random(seed), range(WORLD), shape, partial=False)
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    counts = torch.zeros(shape, dtype=torch.int64)
    for layout in layouts(annotation, shape):
        local = layout.take(full)
        assert local.shape == layout.local_shape
        pieces = layout.counted_pieces(local)
        values = torch.cat([piece.reshape(-1) for piece in pieces]) if pieces else local.new_zeros(0)
        counts.view(-1).index_add_(0, values, torch.ones_like(values))
    assert torch.equal(counts, torch.ones_like(counts))


@given(st.integers(0, 10**6), SHAPES)
def test_chunks_say_where_each_owned_element_is(seed: int, shape: tuple[int, ...]) -> None:
    annotation = random_annotation(Random(seed), range(WORLD), shape, partial=False)
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    for layout in layouts(annotation, shape):
        local = layout.take(full)
        chunks = (*layout.counted_chunks, *layout.other_chunks)
        assert sum(box.numel for box, _ in chunks) == local.numel()
        assert len({tuple(start for start, _ in box.bounds) for box, _ in chunks}) == len(chunks)
        for box, place in chunks:
            assert torch.equal(full[index(box)], local[index(place)])


def test_equal_layouts_are_one_object() -> None:
    first, second = (home_layout(Annotation.on((0, 1), Split(0, (2, 2))), (8,), 1, 2) for _ in range(2))
    assert first is second


def test_copies_share_the_counting() -> None:
    annotation = Annotation.on((0, 1, 2), Duplicate(3))
    assert [layout.counted[0].bounds for layout in layouts(annotation, (9, 4))[:3]] == [
        ((0, 3), (0, 4)),
        ((3, 6), (0, 4)),
        ((6, 9), (0, 4)),
    ]


def test_summands_and_strangers_are_refused() -> None:
    with pytest.raises(AnnotationError, match="cannot be partial"):
        home_layout(Annotation.on((0, 1), Partial(2)), (4,), 0, 2)
    with pytest.raises(AnnotationError, match="outside a world of 2"):
        home_layout(Annotation.on((0, 2), Duplicate(2)), (4,), 0, 2)


def test_a_scalar_has_a_chunk_on_the_rank_that_owns_it_alone() -> None:
    owner, other = (home_layout(Annotation.on((0,)), (), rank, 2) for rank in range(2))
    assert [len(chunks) for chunks in (owner.counted_chunks, owner.other_chunks)] == [1, 0]
    assert (other.counted_chunks, other.other_chunks) == ((), ())
