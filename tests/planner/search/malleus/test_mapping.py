from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.planner.search.malleus.device_groups import Group, GroupKind
from hetu_fx.planner.search.malleus.mapping import (
    LayerSlice,
    WantedGroup,
    holdings,
    map_groups,
    moved_layers,
    order_ranks,
)
from hetu_fx.plans.plan import Pipeline, Plan, Stage

KIND = GroupKind(1.0, 2, 0.0)
TWO_BY_TWO = Plan(
    (
        Pipeline((Stage((0, 1), blocks=4), Stage((2, 3), blocks=4))),
        Pipeline((Stage((4, 5), blocks=4), Stage((6, 7), blocks=4))),
    )
)
PLACES = [
    WantedGroup(0, 0, 4, KIND),
    WantedGroup(0, 4, 8, KIND),
    WantedGroup(1, 0, 4, KIND),
    WantedGroup(1, 4, 8, KIND),
]


def pairs(nodes: str) -> list[Group]:
    """Return groups of two devices each, with a digit for each group's node."""
    return [Group((2 * i, 2 * i + 1), int(node), KIND) for i, node in enumerate(nodes)]


def test_a_plan_says_what_each_device_holds() -> None:
    held = holdings(TWO_BY_TWO, 8)
    assert held[3] == (LayerSlice(4, 8, position=1, size=2, stage=1),)
    assert held[4] == (LayerSlice(0, 4, position=0, size=2, stage=2),)
    assert holdings(None, 8) == {}


def test_a_device_whose_stage_is_in_chunks_holds_a_part_for_each() -> None:
    dealt = Plan(
        (Pipeline((Stage((0, 1), blocks=5), Stage((2,), blocks=3)), micro_batches=2),), schedule="interleaved", chunks=2
    )
    held = holdings(dealt, 8)
    assert held[1] == (LayerSlice(0, 3, 1, 2, stage=0), LayerSlice(5, 7, 1, 2, stage=0))
    assert held[2] == (LayerSlice(3, 5, 0, 1, stage=1), LayerSlice(7, 8, 0, 1, stage=1))
    assert moved_layers((2,), 2, 8, held) == 6.0 - 2.0 - 1.0
    assert moved_layers((0, 1), 0, 8, held) == 8.0 - 3.0 - 2.0


def test_what_a_device_held_need_not_move() -> None:
    held = {0: (LayerSlice(0, 8, 0, 2),)}
    assert moved_layers((0,), 0, 8, held) == 4.0  # it had half of each layer
    assert moved_layers((0, 1), 4, 12, held) == 2.0 + 4.0
    assert moved_layers((1, 0), 0, 4, held) == 2.0 + 2.0  # the other halves
    assert moved_layers((0,), 8, 10, held) == 2.0


def test_nothing_moves_when_nothing_changes() -> None:
    mapped = map_groups(PLACES, pairs("0000"), holdings(TWO_BY_TWO, 8))
    assert mapped.moved_layers == 0.0
    assert [group.devices for group in mapped.groups] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_copies_of_a_layer_stand_on_one_node() -> None:
    mapped = map_groups(PLACES, pairs("0011"), {})
    assert mapped.crossings == 0
    assert mapped.groups[0].node == mapped.groups[2].node != mapped.groups[1].node == mapped.groups[3].node


def test_crossings_come_before_what_is_moved() -> None:
    # staying as they are would move nothing, but every layer's copies would stand on two nodes
    mapped = map_groups(PLACES, pairs("0011"), holdings(TWO_BY_TWO, 8))
    assert mapped.crossings == 0
    assert 0 < mapped.moved_layers <= 8.0


def test_a_group_stands_only_where_its_kind_is_wanted() -> None:
    slow = GroupKind(3.0, 2, 0.0)
    groups = [*pairs("00"), Group((4, 5), 0, slow)]
    mapped = map_groups([WantedGroup(0, 0, 2, slow), WantedGroup(0, 2, 8, KIND)], groups, {})
    assert [group.kind for group in mapped.groups] == [slow, KIND]


@settings(max_examples=60)
@given(st.permutations([0, 1, 2, 3]), st.lists(st.sampled_from("012"), min_size=4, max_size=4))
def test_no_swap_of_two_groups_is_better(order: list[int], nodes: list[str]) -> None:
    groups = [pairs("".join(nodes))[i] for i in order]
    held = holdings(TWO_BY_TWO, 8)
    mapped = map_groups(PLACES, groups, held)
    assert mapped == map_groups(PLACES, list(reversed(groups)), held)

    def score(chosen: tuple[Group, ...]) -> tuple[int, float]:
        crossings = sum(4 * (chosen[i].node != chosen[i + 2].node) for i in (0, 1))
        moved = sum(moved_layers(g.devices, p.start, p.stop, held) for g, p in zip(chosen, PLACES, strict=True))
        return crossings, moved

    assert (mapped.crossings, mapped.moved_layers) == score(mapped.groups)
    for i, j in permutations(range(4), 2):
        swapped = list(mapped.groups)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        assert score(mapped.groups) <= score(tuple(swapped))


def test_equally_fast_devices_stay_with_their_stage() -> None:
    rates = dict.fromkeys(range(8), 1.0) | {1: 3.0}
    held = holdings(TWO_BY_TWO, 8)
    assert order_ranks(range(8), rates, held) == [2, 3, 4, 5, 6, 7, 0, 1]
    assert order_ranks(range(8), rates, {}) == [0, 2, 3, 4, 5, 6, 7, 1]
