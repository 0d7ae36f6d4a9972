import re
from dataclasses import replace

import pytest

from benchmarks.cases.published_malleus import LLAMA_70B, ideal_slowdown, nodes_of
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.malleus.situation import LayerMemory, MalleusSituation

SMALL = MalleusSituation(nodes_of(4, 8), 8, 16, 2, {4: 1.0, 2: 1.9})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers 0\nhint: give 1 or more"),
        ({"num_pipelines": 17}, "16 micro-batches for 17 pipelines\nhint: give each at least one"),
        ({"layer_seconds": {3: 1.0}}, "degrees [3]\nhint: give powers of two"),
        ({"layer_seconds": {}}, "degrees []\nhint: give powers of two"),
        ({"layer_seconds": {2: 0.0}}, "give a finite number above 0"),
        ({"layer_seconds": {2: 1.0, 1: 1.0}}, "a larger group is no faster than a smaller one\nhint: leave that"),
    ],
)
def test_a_situation_that_cannot_be_is_refused_with_the_way_out(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        replace(SMALL, **change)


@pytest.mark.parametrize("table", [(), (0.0,), (2.0, 1.0)])
def test_layer_bytes_that_fall_are_refused(table: tuple[float, ...]) -> None:
    with pytest.raises(PlanError, match="do not fall, the last stage's first"):
        LayerMemory(table)


def test_negative_reserves_are_refused() -> None:
    with pytest.raises(PlanError, match=r"reserve_bytes -1\nhint: give a finite number, 0 or more"):
        LayerMemory((1.0,), reserve_bytes=-1)


def test_a_stage_holds_one_more_micro_batch_for_each_that_follows() -> None:
    memory = LayerMemory.linear(100, 7)
    assert [memory.at(following) for following in (0, 1, 5)] == [107, 114, 142]
    assert LayerMemory((3.0,)).at(4) == 3.0


def test_a_table_goes_on_as_it_ends() -> None:
    memory = LayerMemory((10.0, 12.0, 15.0))
    assert [memory.at(following) for following in (0, 2, 3, 5)] == [10, 15, 18, 24]


def test_the_order_of_degrees_given_does_not_matter() -> None:
    assert replace(SMALL, layer_seconds={2: 1.9, 4: 1.0}) == SMALL
    assert SMALL.degrees == (4, 2)


def test_rates_count_a_slower_kind_and_a_straggler_alike() -> None:
    cluster = Cluster.on_paper([4e12, 2e12, 4e12]).with_rates({2: 1.5})
    situation = replace(SMALL, cluster=cluster)
    assert situation.rates == {0: 1.0, 1: 2.0, 2: 1.5}
    assert [situation.straggles(rank) for rank in (0, 1, 2)] == [False, True, True]


def test_the_least_memory_of_a_group_is_its_room() -> None:
    cluster = Cluster.on_paper([1e12] * 2, memory_bytes=[100, 80])
    situation = replace(SMALL, cluster=cluster, memory=LayerMemory((1.0,), reserve_bytes=10))
    assert situation.room_bytes((0, 1)) == 140


@pytest.mark.parametrize(
    ("rates", "slowdown"), [({0: 12.53}, 1.0146), (dict.fromkeys(range(8), 2.57), 1.0827), ({}, 1.0)]
)
def test_work_split_at_will_slows_by_the_harmonic_share(rates: dict[int, float], slowdown: float) -> None:
    assert round(ideal_slowdown(LLAMA_70B.situation(rates)), 4) == slowdown
