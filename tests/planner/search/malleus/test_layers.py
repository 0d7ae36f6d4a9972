from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from hetu_fx.planner.search.malleus.device_groups import GroupKind
from hetu_fx.planner.search.malleus.layers import FilledPipeline, Kinds, LayerFiller
from hetu_fx.planner.search.malleus.situation import LayerMemory, MalleusSituation
from tests.planner.search.malleus.models import ample, kinds

SECONDS = st.floats(1, 9).map(lambda x: round(x, 1))


def limits(stages: Kinds, situation: MalleusSituation) -> list[int]:
    memory, last = situation.memory, len(stages) - 1
    assert memory is not None
    rooms = [kind.room_bytes - memory.edge_bytes * (j in (0, last)) for j, kind in enumerate(stages)]
    return [int(room // memory.at(last - j)) for j, room in enumerate(rooms)]


@settings(max_examples=200)
@given(st.lists(SECONDS, min_size=1, max_size=4), st.integers(1, 9))
def test_without_memory_it_equals_brute_force(seconds: list[float], layers: int) -> None:
    stages = kinds(*seconds)
    counts = [c for c in product(range(layers + 1), repeat=len(stages)) if sum(c) == layers]
    best = min(max(kind.seconds * n for kind, n in zip(stages, c, strict=True)) for c in counts)
    filled = LayerFiller(ample(layers, 4, 1)).fill(stages)
    assert filled is not None
    assert (filled.bottleneck, sum(filled.layers)) == (best, layers)
    assert min(filled.layers) >= 1


def least_by_milp(stages: Kinds, situation: MalleusSituation) -> float | None:
    """Solve the paper's lower level program, stages in the given order, by HiGHS."""
    count = len(stages)
    costs = np.diag([kind.seconds for kind in stages])
    late = LinearConstraint(np.hstack([costs, -np.ones((count, 1))]), -np.inf, 0)
    whole = LinearConstraint(np.array([[1.0] * count + [0.0]]), situation.num_layers, situation.num_layers)
    high = limits(stages, situation)
    if min(high) < 1:
        return None
    bounds = Bounds([1] * count + [0], [*high, np.inf])
    solved = milp([0] * count + [1], constraints=[late, whole], bounds=bounds, integrality=[1] * count + [0])
    return float(solved.x[-1]) if solved.success else None


@settings(max_examples=60)
@given(st.lists(st.tuples(SECONDS, st.sampled_from([1, 2, 4])), min_size=1, max_size=6), st.integers(20, 90))
def test_with_memory_it_is_never_worse_than_the_integer_program(groups: list[tuple[float, int]], layers: int) -> None:
    memory = LayerMemory.linear(2.0, 0.5, edge_bytes=3.0)
    situation = replace(ample(layers, 8, 1), memory=memory)
    stages = tuple(sorted((GroupKind(y, size, 25.0 * size) for y, size in groups), reverse=True))
    best, filled = least_by_milp(stages, situation), LayerFiller(situation).fill(stages)
    if best is not None:
        assert filled is not None
        assert filled.bottleneck <= best * (1 + 1e-6)
    if filled is not None:
        assert sum(filled.layers) == layers
        assert all(1 <= n <= most for n, most in zip(filled.layers, limits(filled.kinds, situation), strict=True))


@settings(max_examples=100)
@given(st.lists(SECONDS, min_size=1, max_size=5), st.integers(1, 40), st.data())
def test_a_slower_group_never_helps(seconds: list[float], layers: int, data: st.DataObject) -> None:
    slower = [y + data.draw(st.sampled_from([0.0, 0.5, 3.0])) for y in seconds]
    filler = LayerFiller(ample(layers, 8, 1))
    before, after = filler.fill(kinds(*seconds)), filler.fill(kinds(*slower))
    assert before is not None
    assert after is not None
    assert before.bottleneck <= after.bottleneck


def test_a_group_too_slow_for_one_layer_is_left_out() -> None:
    filled = LayerFiller(ample(8, 4, 1)).fill(kinds(90.0, 1.0, 1.0))
    assert filled == FilledPipeline(kinds(1.0, 1.0), (4, 4), 4.0)


def test_what_fits_no_memory_is_none() -> None:
    situation = replace(ample(8, 4, 1), memory=LayerMemory((1.0,)))
    assert LayerFiller(situation).fill(kinds(1.0, 1.0, room=3.0)) is None
    assert LayerFiller(situation).fill(()) is None


def test_a_front_stage_holds_fewer_layers_where_memory_is_short() -> None:
    situation = replace(ample(10, 4, 1), memory=LayerMemory.linear(1.0, 1.0))
    filled = LayerFiller(situation).fill(kinds(1.0, 1.0, room=13.0))
    assert filled is not None
    assert filled.layers == (4, 6)


def test_a_small_healthy_group_makes_way_where_memory_is_short() -> None:
    # the group of 1 is slowest, but in front, with three stages after it, it could not hold a layer
    stages = (GroupKind(2.0, 1, 3.0), GroupKind(1.0, 2, 40.0), GroupKind(1.0, 2, 40.0))
    situation = replace(ample(10, 4, 1), memory=LayerMemory.linear(1.0, 1.5))
    filled = LayerFiller(situation).fill(stages)
    assert filled is not None
    assert filled.bottleneck == pytest.approx(5.0)
