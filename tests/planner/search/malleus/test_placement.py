import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.planner.search.allocate import spread_evenly
from hetu_fx.planner.search.malleus import search as placement
from hetu_fx.planner.search.malleus.device_groups import GroupKind
from hetu_fx.planner.search.malleus.layers import LayerFiller
from hetu_fx.planner.search.malleus.search import Placer
from hetu_fx.planner.search.malleus.situation import LayerMemory, MalleusSituation
from tests.planner.search.malleus.models import ample, kinds

SECONDS = st.floats(1, 9).map(lambda x: round(x, 1))


def partitions(groups: Sequence[GroupKind], number: int) -> Iterator[list[list[GroupKind]]]:
    """Yield every way to put groups into `number` pipelines."""
    if not groups:
        yield [[] for _ in range(number)]
        return
    for rest in partitions(groups[1:], number):
        for i in range(number):
            yield [[*p, groups[0]] if i == j else p for j, p in enumerate(rest)]


def brute_force(groups: Sequence[GroupKind], situation: MalleusSituation) -> float:
    filler, best = LayerFiller(situation), math.inf
    for bins in partitions(groups, situation.num_pipelines):
        filled = [filler.fill(tuple(sorted(one, reverse=True))) for one in bins]
        known = [one for one in filled if one is not None]
        if len(known) == len(bins):
            costs, low = [one.bottleneck for one in known], [len(one.kinds) for one in known]
            counts = spread_evenly(situation.num_micro_batches, costs, low)
            if counts is not None:
                best = min(best, max(y * n for y, n in zip(costs, counts, strict=True)))
    return best


CASES = given(st.lists(SECONDS, min_size=1, max_size=6), st.integers(2, 12), st.integers(1, 3), st.integers(6, 20))


@settings(max_examples=150)
@CASES
def test_the_exact_search_equals_brute_force(seconds: list[float], layers: int, pipelines: int, batch: int) -> None:
    situation, groups = ample(layers, batch, pipelines), kinds(*seconds)
    placer = Placer(situation)
    found, best = placer.place(groups), brute_force(groups, situation)
    assert placer.is_exact
    assert (math.inf if found is None else found.seconds) == pytest.approx(best, rel=1e-12)


@settings(max_examples=80)
@CASES
def test_it_equals_brute_force_where_memory_is_short(
    seconds: list[float], layers: int, pipelines: int, batch: int
) -> None:
    situation = replace(ample(layers, batch, pipelines), memory=LayerMemory.linear(2.0, 1.0, edge_bytes=1.0))
    groups = kinds(*seconds, room=15.0)
    found = Placer(situation).place(groups)
    seconds_found = math.inf if found is None else found.seconds
    assert seconds_found == pytest.approx(brute_force(groups, situation), rel=1e-12)


@settings(max_examples=80)
@CASES
def test_the_descent_alone_is_never_better(seconds: list[float], layers: int, pipelines: int, batch: int) -> None:
    situation, groups = ample(layers, batch, pipelines), kinds(*seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetu_fx.planner.search.malleus.layers.MOST_PIPELINES", 0)
        placer = Placer(situation)
        alone = placer.place(groups)
    assert not placer.is_exact
    assert alone is None or alone.seconds >= brute_force(groups, situation) * (1 - 1e-12)
    assert alone is None or sum(alone.micro_batches) == batch


def test_only_what_is_faster_than_the_limit_is_returned() -> None:
    placer, groups = Placer(ample(8, 8, 2)), kinds(1.0, 1.0, 2.0)
    best = placer.place(groups)
    assert best is not None
    assert placer.place(groups, best.seconds) is None
    assert placer.place(groups, best.seconds * 1.01) == best


def test_a_group_that_the_step_does_not_need_is_left_out() -> None:
    # with or without the slow group the bottleneck is 4, and filling the pipeline takes longer with it
    found = Placer(ample(7, 4, 1)).place(kinds(4.0, 1.0, 1.0))
    assert found is not None
    assert found.pipelines[0].kinds == kinds(1.0, 1.0)


def test_every_pipeline_has_a_micro_batch_per_stage() -> None:
    found = Placer(ample(4, 5, 2)).place(kinds(1.0, 1.0, 1.0, 1.0))
    assert found is not None
    assert all(m >= len(p.kinds) for m, p in zip(found.micro_batches, found.pipelines, strict=True))


def test_the_descent_stops_when_its_budget_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MOST_SWAPS", 0)
    monkeypatch.setattr("hetu_fx.planner.search.malleus.layers.MOST_PIPELINES", 0)
    placer = Placer(ample(12, 12, 2))
    dealt = placer.place(kinds(1.0, 1.1, 1.7, 2.0, 3.1))
    assert dealt is not None
    assert placer.filler.num_filled == 2 + 5  # the two pipelines as dealt, then each of 5 groups left out


def test_a_part_searched_exactly_betters_what_pairs_of_pipelines_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    situation, groups = ample(32, 48, 6), kinds(*[1.0] * 14, 1.9, 2.6, 3.7, 3.7, 3.7)
    monkeypatch.setattr(placement, "MOST_STEPS", 0)
    whole = Placer(situation)
    found = whole.place(groups)
    monkeypatch.setattr(placement, "MOST_PARTS", 0)
    alone = Placer(situation).place(groups)
    assert found is not None
    assert alone is not None
    assert not whole.is_exact
    assert found.seconds < alone.seconds
    assert sum(found.micro_batches) == situation.num_micro_batches
