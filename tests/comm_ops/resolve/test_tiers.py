"""What collectives can do: which groups pair up, which axes and tops have one, and how axes are refined."""

import pytest

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.annotations.states import Duplicate, Partial, Sharding, Split
from hetu_fx.comm_ops.resolve.edge import ReshardEdge
from hetu_fx.comm_ops.resolve.tiers import SplitLevel, across_groups, along_axes, refine, restore, same_top


def edge(source, target, shape=(24, 12)):
    return ReshardEdge.plain(parse_annotation(source), parse_annotation(target), shape)


@pytest.mark.parametrize(
    ("source", "target", "pairs"),
    [
        ("D(2) over {[0,1] P(2); [2]}", "D(2) over {[0] ; [1]}", False),  # rank 1 would be in both pairs
        ("S(0, 2) over {[0,1] P(2); [2,3] P(2)}", "S(0, 2) over {[2,3] D(2); [0,1] D(2)}", False),
        ("S(0, 2) over {[0,1] P(2); [2,3] P(2)}", "S(0, 2) over {[1,0] D(2); [4]}", True),
        ("S(0, 2) over {[0]; [1]}", "S(0, 2:1) over {[0]; [1]}", False),
        ("D(2) over {[0]; [1]}", "D(3) over {[0]; [1]; [2]}", False),
        ("[0]", "[0]", False),
    ],
)
def test_groups_pair_up_under_one_top_if_no_rank_is_in_two_pairs(source, target, pairs):
    assert same_top(edge(source, target)) is pairs


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("[0,1] S(0, 2)", "[1,0] D(2)"),  # another order
        ("[0,1] S(0, 2)", "[0,1] S(1, 2)"),  # no collective for it
        ("[0-3] S(0, 2) D(2)", "[0-3] D(2) S(0, 2)"),  # the same dim joined and cut
        ("[0-3] S(0, 4:2:2:4)", "[0-3] S(0, 2) D(2)"),  # uneven parts that do not nest
        ("[0-5] D(2) P(3)", "[0-5] D(3) P(2)"),  # axes that do not nest
    ],
)
def test_some_changes_of_a_group_have_no_collectives(source, target):
    assert along_axes(edge(source, target)) is None


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("D(2) over {[0]; [1]}", "S(0, 2) over {[0]; [1]}"),  # no collective for it
        ("P(2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(1, 2); [2]}"),  # shardings differ
        ("P(2) over {[0,1] P(2); [2]}", "D(2) over {[0,1] P(2); [2]}"),  # summands inside a group
        ("S(0, 2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}"),  # slices change hands
    ],
)
def test_some_changes_of_the_top_have_no_split_collective(source, target):
    assert across_groups(edge(source, target)) is None


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
