"""Which devices of unequal groups meet: the groups of Hetu v2's examples (fact sheet 1.3)."""

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.comm_ops.plans.routes import collectives_of_rank, fits, slice_groups
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.comm_ops.resolve.resolution import TopStep


def groups(members, size=12):
    """(ranks, rows) of every group that sums a tensor of `size` rows over a union."""
    ways = members.count(";") + 1
    source, target = (parse_annotation(f"{top}({ways}) over {{{members}}}") for top in "PD")
    change = Transition(source, target, (size,))
    return [(group.ranks, [dims[0] for dims in group.parts[0]]) for group in slice_groups(change)]


def test_two_pairs_and_a_single_device_meet_in_two_groups():
    found = groups("[0,1] S(0, 2); [2,3] S(0, 2); [4]")
    assert found == [((0, 2, 4), [((0, 6),)]), ((1, 3, 4), [((6, 12),)])]


def test_four_shards_meet_two():
    assert [ranks for ranks, _ in groups("[0-3] S(0, 4); [4,5] S(0, 2)")] == [(0, 4), (1, 4), (2, 5), (3, 5)]


def test_unequal_numbers_of_copies_go_round_robin():
    found = groups("[0,1] D(2); [2]; [3-6] D(4)")
    assert [ranks for ranks, _ in found] == [(0, 2, 3), (0, 2, 5), (1, 2, 4), (1, 2, 6)]


def test_three_shards_meet_two_at_the_union_of_their_cuts():
    found = groups("[0-2] S(0, 3); [3,4] S(0, 2)")
    assert found == [
        ((0, 3), [((0, 4),)]),
        ((1, 3), [((4, 6),)]),
        ((1, 4), [((6, 8),)]),
        ((2, 4), [((8, 12),)]),
    ]


def test_scattered_slices_land_where_the_group_holds_them():
    source = parse_annotation("P(2) over {[0,1] S(1, 2); [2]}")
    target = parse_annotation("S(0, 2:1) over {[0,1] S(1, 2); [2]}")
    (first, second) = slice_groups(Transition(source, target, (6, 4)))
    assert first.ranks == (0, 2)
    assert first.parts == ((((((0, 4),), ((0, 2),))),), ((((4, 6),), ((0, 2),)),))
    assert second.ranks == (1, 2)
    assert collectives_of_rank(Transition(source, target, (6, 4)), 2) == (first, second)


def test_a_dim_that_both_tiers_cut_does_not_fit():
    source = parse_annotation("S(0, 2) over {[0,1] S(0, 2); [2]}")
    target = parse_annotation("D(2) over {[0,1] S(0, 2); [2]}")
    assert not fits(Transition(source, target, (8,)))
    assert not fits(Transition(parse_annotation("P(2) over {[0,1] P(2); [2]}"), source, (8,)))


def test_entries_cross_groups_once_per_copy_of_the_group_with_most():
    for members, expected in (("[0-3] S(0, 4); [4,5] S(0, 2)", 12), ("[0,1] D(2); [2]; [3-6] D(4)", 2 * 4 * 12)):
        ways = members.count(";") + 1
        source, target = (parse_annotation(f"{top}({ways}) over {{{members}}}") for top in "PD")
        step = TopStep("split_all_reduce", source, target, (12,), "duplicate")
        assert step.traffic == expected == sum((len(ranks) - 1) * numel for ranks, numel in step.collectives())
