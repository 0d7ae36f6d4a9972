from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.published_malleus import LLAMA_32B, LLAMA_70B, nodes_of
from hetu_fx.planner.search.malleus.device_groups import (
    Grouping,
    ignoring_stragglers,
    leaving_out_stragglers,
    node_groupings,
)
from hetu_fx.planner.search.malleus.situation import MalleusSituation


def sizes(grouping: Grouping) -> list[int]:
    return [len(group.devices) for group in grouping.groups]


def node(situation: MalleusSituation) -> list[int]:
    return sorted(situation.nodes[0], key=lambda rank: (situation.rates[rank], rank))


@pytest.mark.parametrize("rate", [2.57, 12.53])
def test_a_straggler_splits_its_node_and_may_stand_by(rate: float) -> None:
    situation = LLAMA_70B.situation({0: rate})
    found = {tuple(sizes(g)): g for g in node_groupings(situation, node(situation))}
    split = found[4, 2, 1]
    assert split.standby == (0,)
    assert split.capacity == pytest.approx(1 / 1.9 + 1 / 3.66 + 1 / 7.22)
    assert found[8,].capacity == pytest.approx(1 / rate)


def test_a_node_without_stragglers_keeps_the_largest_degree() -> None:
    for published in (LLAMA_70B, LLAMA_32B):
        situation = published.situation({9: 3.0})
        (whole,) = node_groupings(situation, node(situation))
        assert sizes(whole) == [max(published.layer_seconds)] * (8 // max(published.layer_seconds))
        assert whole.standby == ()


def test_stragglers_of_one_rate_share_a_group() -> None:
    situation = LLAMA_70B.situation({0: 2.57, 2: 2.57, 4: 2.57, 6: 2.57})
    best = node_groupings(situation, node(situation))[0]
    assert [group.devices for group in best.groups] == [(1, 3, 5, 7), (0, 2, 4, 6)]


def test_devices_too_few_for_the_least_degree_stand_by() -> None:
    situation = MalleusSituation(nodes_of(7, 7), 8, 8, 1, {4: 1.0, 2: 2.0})
    (grouping,) = node_groupings(situation, node(situation))
    assert (sizes(grouping), grouping.standby) == ([4, 2], (6,))


def test_stragglers_may_be_ignored_or_left_out() -> None:
    situation = LLAMA_70B.situation({0: 3.0, 1: 5.0})
    assert sizes(ignoring_stragglers(situation, node(situation))) == [8]
    left = leaving_out_stragglers(situation, node(situation))
    assert (sizes(left), left.standby) == ([4, 2], (0, 1))


def all_capacities(ranks: Sequence[int], situation: MalleusSituation) -> Iterator[float]:
    """Yield the capacity of every way to form groups of some of the devices."""
    if not ranks:
        yield 0.0
        return
    first, rest = ranks[0], ranks[1:]
    yield from all_capacities(rest, situation)
    for mask in range(1 << len(rest)):
        mates = [rank for i, rank in enumerate(rest) if mask >> i & 1]
        if len(mates) + 1 in situation.layer_seconds:
            others = [rank for rank in rest if rank not in mates]
            slowest = max(situation.rates[rank] for rank in (first, *mates))
            share = 1 / (situation.layer_seconds[len(mates) + 1] * slowest)
            yield from (share + more for more in all_capacities(others, situation))


@settings(max_examples=60)
@given(st.lists(st.floats(1, 9).map(lambda x: round(x, 1)), min_size=1, max_size=6), st.floats(2, 2.5))
def test_no_grouping_has_more_capacity_than_the_first(rates: list[float], loss: float) -> None:
    # where a split of equals gains nothing: else equals would be split, which the search leaves as given
    cluster = nodes_of(8, len(rates)).with_rates(dict(enumerate(rates)))
    situation = MalleusSituation(cluster, 8, 8, 1, {4: 1.0, 2: loss, 1: loss * loss})
    best = node_groupings(situation, node(situation))[0]
    assert best.capacity == pytest.approx(max(all_capacities(range(len(rates)), situation)))
