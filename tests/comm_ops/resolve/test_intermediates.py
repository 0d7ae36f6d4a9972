"""Annotations to stop at: summed up, cut up, with the summands on top."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.comm_ops.resolve.intermediates import (
    cut_copies,
    partial_on_top,
    reduced_annotations,
    scattered_annotations,
)
from tests.oracles.annotation_definition import parts
from tests.oracles.annotation_samples import random_annotation

SHAPE = (24, 8)
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("annotation", "shape", "expected"),
    [
        ("[0,1] D(2)", (24, 8), []),
        ("[0,1] P(2)", (24, 8), ["[0,1] S(0, 2)", "[0,1] D(2)"]),
        ("[0-3] S(0, 2) P(2)", (24, 8), ["[0-3] S(0, 2) S(1, 2)", "[0-3] S(0, 2) D(2)"]),
        ("[0,1] P(2)", (1, 7), ["[0,1] S(1, 3:4)", "[0,1] D(2)"]),
        ("[0,1] P(2)", (None, 8), ["[0,1] S(1, 2)", "[0,1] D(2)"]),
        ("[0,1] P(2)", (), ["[0,1] D(2)"]),
        # All dims are split inside the groups: every finest slice is shared.
        ("P(2) over {[0-2] S(0, 3); [3,4] S(0, 2)}", (24,),
         ["S(0, 2, 6x_x1) over {[0-2] S(0, 3); [3,4] S(0, 2)}", "D(2) over {[0-2] S(0, 3); [3,4] S(0, 2)}"]),
        ("P(2) over {[0,1] S(0, 2, 3x_x1); [2]}", (24,), ["D(2) over {[0,1] S(0, 2, 3x_x1); [2]}"]),
    ],
)  # fmt: skip
def test_summands_are_added_up_and_cut_up_where_a_dim_is_free(annotation, shape, expected):
    assert [str(found) for found in reduced_annotations(parse_annotation(annotation), shape)] == expected


def test_copies_are_cut_up_on_both_tiers():
    whole = parse_annotation("D(2) over {[0,1] S(0, 2); [2-4] D(3)}")
    assert [str(found) for found in scattered_annotations(whole, SHAPE)] == [
        "S(1, 2) over {[0,1] S(0, 2); [2-4] S(0, 3)}"
    ]
    assert [str(sharding.axes) for sharding in cut_copies(whole, SHAPE)] == [
        str(sharding.axes) for sharding in scattered_annotations(whole, SHAPE)[0].shardings
    ]
    assert scattered_annotations(parse_annotation("[0,1] S(0, 2)"), SHAPE) == []


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("[0-3] P(2) S(0, 2)", "P(2) over {[0,1] S(0, 2); [2,3] S(0, 2)}"),
        ("[0-3] S(0, 2) P(2)", "P(2) over {[0,2] S(0, 2); [1,3] S(0, 2)}"),
        ("P(2) over {[0,1] D(2); [2]}", "P(2) over {[0,1] D(2); [2]}"),
        ("P(2) over {[0,1] P(2); [2]}", None),
        ("D(2) over {[0,1] P(2); [2]}", None),
        ("[0,1] D(2)", None),
    ],
)
def test_summands_become_groups(annotation, expected):
    found = partial_on_top(parse_annotation(annotation))
    assert (None if found is None else str(found)) == expected


@settings(max_examples=200)
@given(SEEDS)
def test_what_is_proposed_fits_and_keeps_the_ranks(seed):
    annotation = random_annotation(Random(seed), range(12), SHAPE)
    for found in (*reduced_annotations(annotation, SHAPE), *scattered_annotations(annotation, SHAPE)):
        found.check_shape(SHAPE)
        assert found.groups == annotation.groups
    assert not any(found.has_partial for found in reduced_annotations(annotation, SHAPE))
    on_top = partial_on_top(annotation)
    if on_top is not None:
        before, after = parts(annotation, SHAPE), parts(on_top, SHAPE)
        assert all([list(d) for d in before[r].dims] == [list(d) for d in after[r].dims] for r in annotation.ranks)
        assert all(before[r].summand == after[r].summand for r in annotation.ranks)
