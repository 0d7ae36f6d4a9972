from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from hetu_fx.planner.search.allocate import spread, spread_evenly

COSTS = st.floats(0.5, 20).map(lambda x: round(x, 2))


def highest(costs: list[float], counts: tuple[int, ...]) -> float:
    return max(y * n for y, n in zip(costs, counts, strict=True))


@settings(max_examples=300)
@given(st.integers(0, 12), st.lists(COSTS, min_size=1, max_size=4), st.data())
def test_it_equals_brute_force_and_the_general_spread(total: int, costs: list[float], data: st.DataObject) -> None:
    limits = st.lists(st.integers(0, 6), min_size=len(costs), max_size=len(costs))
    low, high = data.draw(limits), data.draw(limits)
    ranges = [range(a, b + 1) for a, b in zip(low, high, strict=True)]
    best = min((highest(costs, x) for x in product(*ranges) if sum(x) == total), default=None)
    found = spread_evenly(total, costs, low, high)
    general = spread(total, [lambda n, y=y: y * n for y in costs], low=low, high=high)
    assert (found is None) == (best is None) == (general is None)
    if found is not None and general is not None:
        assert sum(found) == total
        assert all(a <= n <= b for a, n, b in zip(low, found, high, strict=True))
        assert highest(costs, found) == best == highest(costs, general)


def least_by_milp(total: int, costs: list[float], low: list[int], high: list[int]) -> float | None:
    """Solve min T, y_i n_i <= T, sum n_i = total, by HiGHS."""
    count = len(costs)
    sums = LinearConstraint(np.array([[1.0] * count + [0.0]]), total, total)
    late = LinearConstraint(np.hstack([np.diag(costs), -np.ones((count, 1))]), -np.inf, 0)
    bounds = Bounds([*low, 0], [*high, np.inf])
    whole = [1] * count + [0]
    solved = milp([0] * count + [1], constraints=[sums, late], bounds=bounds, integrality=whole)
    return float(solved.x[-1]) if solved.success else None


@settings(max_examples=40)
@given(st.lists(COSTS, min_size=1, max_size=8), st.integers(1, 96), st.data())
def test_it_equals_the_integer_program(costs: list[float], total: int, data: st.DataObject) -> None:
    low = data.draw(st.lists(st.integers(0, 8), min_size=len(costs), max_size=len(costs)))
    high = [n + data.draw(st.integers(0, 40)) for n in low]
    best = least_by_milp(total, costs, low, high)
    found = spread_evenly(total, costs, low, high)
    assert (found is None) == (best is None)
    if found is not None:
        assert highest(costs, found) == pytest.approx(best, rel=1e-6)


def test_the_recorded_layers_of_a_split_node_come_out() -> None:
    assert spread_evenly(80, [7.22, 3.66, 1.9, 1.0, 1.0]) == (3, 7, 14, 28, 28)


def test_equal_receivers_get_equal_counts_and_earlier_ones_the_rest() -> None:
    assert spread_evenly(7, [0.1, 0.1, 0.1]) == (3, 2, 2)
