import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cases.published_hydraulis import SCHEMES, TIMES, strategy
from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.scheme_costs import Scheme, SequenceBatch, Strategy, TimeFit, check_each_once, fit_times

LENGTHS = range(512, 32768, 512)


@pytest.mark.parametrize(
    ("scheme", "length", "milliseconds"), [((16, 1), 32768, 4836), ((16, 1), 4096, 443), ((4, 1), 7808, 2102)]
)
def test_seconds_are_those_of_the_published_constants(scheme: tuple[int, int], length: int, milliseconds: int) -> None:
    assert round(TIMES[scheme].seconds(length) * 1e3) == milliseconds


def test_many_lengths_take_what_each_takes() -> None:
    fit = TIMES[8, 3]
    assert fit.all_seconds(LENGTHS).tolist() == pytest.approx([fit.seconds(length) for length in LENGTHS])


@pytest.mark.parametrize("key", list(TIMES))
def test_a_fit_recovers_the_constants_of_its_samples(key: tuple[int, int]) -> None:
    given_fit = TIMES[key]
    fit, r_squared = fit_times([(length, given_fit.seconds(length) + given_fit.c) for length in LENGTHS])
    assert (fit.b, fit.c) == pytest.approx((given_fit.b, given_fit.c), rel=0.01)
    assert fit.a == pytest.approx(given_fit.a, rel=0.01, abs=1e-15)
    assert r_squared == pytest.approx(1.0)


def test_a_fit_of_noisy_samples_says_how_much_it_explains() -> None:
    noisy = [(length, 1e-4 * length * (1.3 if index % 2 else 0.7)) for index, length in enumerate(LENGTHS)]
    assert 0.5 < fit_times(noisy).r_squared < 0.95


def test_a_fit_has_no_negative_constants() -> None:
    fit, _ = fit_times([(100, 1.0), (200, 1.9), (400, 3.6), (800, 6.9)])  # bends the other way
    assert fit.a == 0
    assert fit.b > 0


@pytest.mark.parametrize("samples", [[(1, 1.0), (2, 2.0)], [(1, 1.0)] * 3, [(1, 1.0), (2, -2.0), (3, 3.0)]])
def test_samples_that_give_no_fit_are_refused(samples: list[tuple[int, float]]) -> None:
    with pytest.raises(PlanError, match="3 different lengths"):
        fit_times(samples)


@pytest.mark.parametrize("constants", [(-1.0, 1.0, 0.0), (math.nan, 1.0, 0.0), (0.0, math.inf, 0.0), (0.0, 0.0, 1.0)])
def test_constants_that_cannot_be_are_refused(constants: tuple[float, float, float]) -> None:
    with pytest.raises(PlanError, match="time fit"):
        TimeFit(*constants)


@pytest.mark.parametrize("sizes", [(0, 1, 128), (1, 0, 128), (1, 1, 0)])
def test_schemes_that_cannot_be_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(PlanError, match="from 1"):
        Scheme(sizes[0], sizes[1], TimeFit(0.0, 1.0), sizes[2])


def test_a_pipeline_takes_its_slowest_row_in_every_slot() -> None:
    scheme = Scheme(4, 3, TimeFit(0.0, 1.0, 0.5), 128)
    assert scheme.devices == 12
    assert scheme.seconds(slowest=2.0, micro_batches=5) == 2.5 * (3 - 1 + 5)


@given(st.permutations([(16, 1), (8, 3), (4, 1), (4, 1), (1, 4)]))
def test_a_strategy_is_a_multiset(order: list[tuple[int, int]]) -> None:
    made = Strategy(tuple(SCHEMES[key] for key in order))
    assert made == strategy((1, (16, 1)), (1, (8, 3)), (2, (4, 1)), (1, (1, 4)))
    assert (sum(one.devices for one in made.pipelines), made.max_length) == (16 + 24 + 8 + 4, 43520)
    assert str(made) == "<tp 16, pp 1> + <tp 8, pp 3> + 2x<tp 4, pp 1> + <tp 1, pp 4>"


def test_a_strategy_needs_a_pipeline() -> None:
    with pytest.raises(PlanError, match="no pipelines"):
        Strategy(())


def test_a_batch_takes_whole_numbers_of_any_kind() -> None:
    assert SequenceBatch((np.int64(3), 7)) == SequenceBatch((3, 7))
    assert SequenceBatch((3, 7, 5)).longest == 7
    with pytest.raises(TypeError):
        SequenceBatch((2.5,))


@pytest.mark.parametrize("lengths", [(), (5, 0), (5, -1)])
def test_batches_that_cannot_be_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="a batch has"):
        SequenceBatch(lengths)


@pytest.mark.parametrize(("groups", "what"), [([[0], [2]], r"\[1\] missing"), ([[0, 1], [1, 2]], r"\[1\] twice")])
def test_what_is_missing_or_doubled_is_named(groups: list[list[int]], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        check_each_once("a test", groups, 3)
