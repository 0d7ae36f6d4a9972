"""The definition of annotations, and that regions say the same in intervals."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.annotations.annotation import parse_annotation
from tests.oracles.annotation_definition import parts
from tests.oracles.annotation_samples import random_annotation

SHAPE = (24, 8, 12)
SEEDS = st.integers(0, 2**32 - 1)


def rows(text, size):
    return {rank: list(part.dims[0]) for rank, part in parts(parse_annotation(text), (size,)).items()}


def test_a_rank_holds_its_share_of_a_split():
    assert rows("[4,2,7] S(0, 2:0:1)", 6) == {4: [0, 1, 2, 3], 2: [], 7: [4, 5]}


def test_a_fused_projection_is_cut_within_each_of_its_factors():
    # Rows are (3 of q, k, v) x 4 heads x 2: each rank holds two heads of all three.
    assert rows("[0,1] S(0, 2, 3x_x2)", 24)[1] == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


def test_the_top_cuts_first():
    assert rows("S(0, 2:1) over {[0,1] S(0, 2); [2]}", 12) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9, 10, 11]}


def test_zero_owns_a_part_of_every_finest_slice():
    # Hetu v2's layout of split optimizer states (fact sheet 3.3), over TP 2 and TP 1.
    found = rows("S(0, 2, 2x_x1) over {[0,1] S(0, 2); [2]}", 8)
    assert found == {0: [0, 1], 1: [4, 5], 2: [2, 3, 6, 7]}


def test_summands_are_numbered_by_both_tiers():
    annotation = parse_annotation("P(2) over {[0-3] P(2) S(0, 2); [4,5] D(2)}")
    assert [part.summand for part in parts(annotation, (4,)).values()] == [0, 0, 1, 1, 2, 2]
    assert [part.summand for part in parts(parse_annotation("[0,1] D(2)"), (4,)).values()] == [None, None]


@settings(max_examples=300)
@given(SEEDS)
def test_regions_are_what_the_definition_says(seed):
    annotation = random_annotation(Random(seed), range(12), SHAPE)
    for rank, part in parts(annotation, SHAPE).items():
        region = annotation.region(rank, SHAPE)
        assert [[i for bounds in dim for i in range(*bounds)] for dim in region.dims] == [list(d) for d in part.dims]
        assert region.summand == part.summand
        assert region.role == ("copy" if part.summand is None else "summand")
        assert region.local_shape == annotation.local_shape(rank, SHAPE) == tuple(map(len, part.dims))
        boxes = [np.s_[tuple(slice(*bounds) for bounds in box.bounds)] for box in region.boxes]
        assert sum(box.numel for box in region.boxes) == math.prod(map(len, part.dims))
        held = np.zeros(SHAPE, bool)
        held[part.grid] = True
        assert all(held[box].all() for box in boxes)


@settings(max_examples=100)
@given(SEEDS)
def test_every_entry_is_held_as_often_as_the_duplicates_say(seed):
    annotation = random_annotation(Random(seed), range(12), SHAPE)
    firsts = np.zeros(SHAPE, int)
    for part in parts(annotation, SHAPE).values():
        firsts[part.grid] += not part.summand
    assert firsts.min() >= 1


@pytest.mark.parametrize("text", ["[0] ", "[0,1] D(2)"])
def test_a_scalar_is_held_whole(text):
    assert all(part.dims == () for part in parts(parse_annotation(text), ()).values())
