"""Axes are refined to common boundaries and restored from them."""

import pytest

from hetu_fx.annotations.sharding import Sharding
from hetu_fx.annotations.states import Duplicate, Partial, Split
from hetu_fx.comm_ops.plans.axes import SplitLevel, refine, restore


def test_a_split_is_cut_in_coarse_and_fine_pieces():
    found = refine([Sharding((Split.even(0, 4),)), Sharding((Duplicate(2), Partial(2)))])
    assert found == [
        (SplitLevel(Split.even(0, 2)), SplitLevel(Split.even(0, 2), (1, 1))),
        (Duplicate(2), Partial(2)),
    ]


def test_uneven_units_are_cut_where_they_factor():
    halves = Sharding((Duplicate(2), Partial(2)))
    found = refine([Sharding((Split(0, (4, 2, 2, 1)),)), halves])
    assert found[0] == (SplitLevel(Split(0, (2, 1))), SplitLevel(Split(0, (2, 1)), (2, 1)))
    assert refine([Sharding((Split(0, (4, 2, 1, 1)),)), halves]) is None
    assert refine([Sharding((Split(0, (2, 1, 0, 0)),)), halves])[0][0].split.units == (1, 0)


def test_axes_that_do_not_nest_are_not_refined():
    assert refine([Sharding((Duplicate(2), Partial(3))), Sharding((Duplicate(3), Partial(2)))]) is None


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(),
        Sharding((Split(1, (4, 2, 2, 1), 3, 5),)),
        Sharding((Split(0, (6, 3, 2, 1)),)),
        Sharding((Duplicate(4),)),
        Sharding((Partial(2), Split.even(0, 2))),
    ],
)
def test_what_is_refined_is_restored(sharding):
    ways = sharding.ways
    axes = (Duplicate(2), Partial(2)) if ways == 4 else ()
    found = refine([sharding, Sharding(axes)])
    assert restore(found[0]) == sharding


def test_a_single_device_has_no_axes():
    assert refine([Sharding(), Sharding()]) == [(), ()]
