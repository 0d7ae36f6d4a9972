"""Symbolic dims: bounds are shares of the size."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.errors import AnnotationError
from tests.oracles.annotation_samples import random_annotation
from tests.oracles.annotation_symbolic import describe, granule

SHAPE = (48, 16)


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_regions_grow_in_step_with_a_size_that_fits(seed, times):
    annotation = random_annotation(Random(seed), range(8), SHAPE)
    unit = granule(annotation, 0)
    assert SHAPE[0] % unit == 0
    for rank in annotation.ranks:
        (small, *others), (large, *same) = (annotation.region(rank, (n, 16)).dims for n in (unit, times * unit))
        assert large == tuple((start * times, stop * times) for start, stop in small)
        assert others == same


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_no_smaller_size_fits(seed):
    annotation = random_annotation(Random(seed), range(8), SHAPE)
    for size in range(1, granule(annotation, 0)):
        with pytest.raises(AnnotationError):
            annotation.check_shape((size, 16))


def test_what_every_rank_holds_is_written_in_shares():
    assert describe(parse_annotation("S(0, 3:1) over {[0,1] P(2); [2] }"), (None, 6)) == (
        "rank 0: summand 0 of [0:3*n0/4, :]\nrank 1: summand 1 of [0:3*n0/4, :]\nrank 2: copy of [3*n0/4:n0, :]"
    )
    assert describe(parse_annotation("[0,1] S(0, 2, 2x_x1)"), (8, None)) == (
        "rank 0: copy of [0:2, :] [4:6, :]\nrank 1: copy of [2:4, :] [6:8, :]"
    )
    assert describe(parse_annotation("[0,1] S(0, 1:0)"), (4,)) == "rank 0: copy of [:]\nrank 1: copy of nothing"
