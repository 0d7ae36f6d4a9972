import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.cases.published_hydraulis import SCHEMES
from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.pack import EXACT_SEQUENCES, Packing, pack, pack_quickly
from hetu_fx.planner.dispatch.scheme_costs import Scheme, TimeFit
from tests.planner.dispatch.examples import lengths_up_to, schemes


@st.composite
def small_cases(draw: st.DrawFn, count: int = 6) -> tuple[Scheme, list[int]]:
    scheme = draw(schemes)
    return scheme, draw(lengths_up_to(scheme.max_length, count=count))


def slowest_row(scheme: Scheme, lengths: list[int], rows: int) -> float:
    """Solve one number of rows by mixed integer programming; infinity when nothing fits."""
    size = len(lengths)
    seconds = scheme.times.all_seconds(lengths)
    each = np.tile(np.eye(size), rows)
    of_row = np.kron(np.eye(rows), np.ones(size))
    found = milp(
        np.eye(1, rows * size + 1, rows * size).ravel(),
        constraints=[
            LinearConstraint(np.pad(each, ((0, 0), (0, 1))), 1, 1),
            LinearConstraint(np.pad(of_row * np.tile(lengths, rows), ((0, 0), (0, 1))), -np.inf, scheme.max_length),
            LinearConstraint(np.hstack([of_row * np.tile(seconds, rows), -np.ones((rows, 1))]), -np.inf, 0),
        ],
        integrality=np.append(np.ones(rows * size), 0),
        bounds=Bounds(0, np.append(np.ones(rows * size), np.inf)),
        options={"mip_rel_gap": 0.0},
    )
    return float(found.fun) if found.success else math.inf


def best_of_all(scheme: Scheme, lengths: list[int]) -> float:
    """Solve every number of rows that may be tried."""
    most = min(len(lengths), sum(lengths) // scheme.filling_tokens)
    least = -(-sum(lengths) // scheme.max_length)
    tried = [(slowest_row(scheme, lengths, rows), rows) for rows in range(least, max(least, most) + 1)]
    if all(math.isinf(slowest) for slowest, _ in tried):
        return math.inf
    return min(scheme.seconds(slowest, rows) for slowest, rows in tried)


@settings(max_examples=40)
@given(small_cases())
def test_small_packings_equal_mixed_integer_programming(case: tuple[Scheme, list[int]]) -> None:
    found, best = pack(*case), best_of_all(*case)
    assert found.bound_seconds == pytest.approx(found.seconds, rel=1e-8)
    if math.isfinite(best):
        assert found.seconds == pytest.approx(best, rel=1e-5)
    else:  # more rows than the tokens need, as the sequences do not fit together
        assert len(found.rows) > -(-sum(case[1]) // case[0].max_length)


@settings(max_examples=60)
@given(small_cases(count=40), st.integers(0, 3))
def test_a_packing_drops_nothing_and_does_not_depend_on_the_order(case: tuple[Scheme, list[int]], seed: int) -> None:
    scheme, lengths = case
    found = pack(scheme, lengths, seed=seed)
    assert sorted(i for row in found.rows for i in row) == list(range(len(lengths)))
    assert max(found.row_tokens) <= scheme.max_length
    assert list(found.row_tokens) == sorted(found.row_tokens, reverse=True)
    assert found.bound_seconds <= found.seconds <= pack_quickly(scheme, lengths).seconds * (1 + 1e-9)
    shuffled = random.Random(seed).sample(lengths, len(lengths))
    again = pack(scheme, shuffled, seed=seed)
    assert lengths_of(again) == lengths_of(found)


def lengths_of(found: Packing) -> list[list[int]]:
    return sorted(sorted(found.lengths[i] for i in row) for row in found.rows)


def test_equal_sequences_are_packed_exactly_in_spite_of_their_symmetry() -> None:
    found = pack(SCHEMES[8, 1], [3000] * EXACT_SEQUENCES)
    assert found.bound_seconds == pytest.approx(found.seconds, rel=1e-8)
    assert sorted(len(row) for row in found.rows) == [5, 5]


def test_more_rows_are_made_when_the_sequences_do_not_fit_together() -> None:
    scheme = Scheme(1, 1, TimeFit(0.0, 1.0, 1.0), max_length=10, filling_tokens=10)
    assert (
        len(pack(scheme, [6, 6, 6]).rows) == len(pack_quickly(scheme, [6, 6, 6]).rows) == 3
    )  # 18 tokens, 2 rows of 10
    long = [6] * (EXACT_SEQUENCES + 1)
    assert len(pack(scheme, long).rows) == len(long)


def test_longest_first_leaves_to_the_search_what_it_misses() -> None:
    scheme = Scheme(1, 1, TimeFit(0.0, 1.0), max_length=12, filling_tokens=12)
    lengths = [7, 6, 5, 4, 2]  # 24 tokens: 7 + 5 and 6 + 4 + 2
    assert sorted(map(sorted, lengths_of(pack(scheme, lengths)))) == [[2, 4, 6], [5, 7]]


def test_rows_are_no_shorter_than_what_keeps_devices_busy() -> None:
    scheme = Scheme(1, 4, TimeFit(0.0, 1.0), max_length=1000, filling_tokens=100)
    assert len(pack(scheme, [50] * 8).rows) == 4
    assert len(pack(Scheme(1, 4, TimeFit(0.0, 1.0), 1000), [50] * 8).rows) == 8


def test_a_pipeline_without_sequences_takes_no_time() -> None:
    found = pack(SCHEMES[4, 2], [])
    assert (found.rows, found.seconds, found.bound_seconds) == ((), 0.0, 0.0)


def test_many_sequences_come_close_to_the_bound() -> None:
    lengths = np.random.default_rng(2).integers(100, 4000, 60).tolist()
    for key in ((16, 1), (8, 3), (4, 2)):
        found = pack(SCHEMES[key], lengths)
        assert found.seconds <= 1.01 * found.bound_seconds


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(PlanError, match=r"holds rows of 7808 tokens, not of 9000"):
        pack(SCHEMES[4, 1], [9000])


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (((0,),), r"\[1, 2\] missing"),
        (((0, 1), (1, 2)), r"\[1\] twice"),
        (((0, 1, 2), ()), "empty row"),
        (((0, 1), (2,)), r"rows of \[10000\] tokens"),
    ],
)
def test_packings_that_cannot_be_are_refused(rows: tuple[tuple[int, ...], ...], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        Packing(SCHEMES[4, 1], (6000, 4000, 100), rows)
