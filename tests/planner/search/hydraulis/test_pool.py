import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.published_hydraulis import POOL, SCHEMES, strategy
from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.strategy import Scheme, Strategy, TimeFit
from hetu_fx.planner.search.hydraulis.pool import StrategyPool, propose

STEP = 100


@st.composite
def small_schemes(draw: st.DrawFn) -> tuple[Scheme, ...]:
    """Draw up to three schemes; the first holds everything, on up to four devices."""
    constants = st.integers(0, 20)
    most = (500, draw(st.integers(1, 500)), draw(st.integers(1, 500)))
    made = [
        Scheme(
            draw(st.integers(1, 2)), draw(st.integers(1, 2)), TimeFit(draw(constants) / 1e4, 1.0, draw(constants)), n
        )
        for n in most
    ]
    return tuple(made[: draw(st.integers(1, 3))])


small_counts = st.dictionaries(st.integers(1, 500), st.integers(0, 5).map(float), min_size=1, max_size=6)


def interval_seconds(scheme: Scheme, pipelines: int, counts: Mapping[int, float], start: int, end: int) -> float:
    """Return what equal pipelines need for the sequences longer than the start, up to the end."""
    inside = {n: count for n, count in counts.items() if start < n <= end and count}
    per_token = scheme.times.c / scheme.max_length
    work = sum(count * (scheme.times.seconds(n) + per_token * n) for n, count in inside.items())
    longest = max((scheme.times.seconds(n) + scheme.times.c for n in inside), default=0.0)
    return max(work / pipelines, longest) + (scheme.stages - 1) * longest


def least_seconds(
    counts: Mapping[int, float], ends: Sequence[int], pipelines: Mapping[Scheme, int], devices: int
) -> float:
    """Enumerate all cuts into intervals, with at most so many pipelines of each scheme, and so many devices."""
    if len(ends) == 1:
        return 0.0
    found = [math.inf]
    for scheme, most in pipelines.items():
        for count in range(1, min(most, devices // scheme.devices) + 1) if scheme.max_length >= ends[-1] else ():
            left = {**pipelines, scheme: most - count}
            for cut in range(1, len(ends)):
                before = least_seconds(counts, ends[:cut], left, devices - count * scheme.devices)
                found.append(max(before, interval_seconds(scheme, count, counts, ends[cut - 1], ends[-1])))
    return min(found)


def best_of_all(schemes: Sequence[Scheme], counts: Mapping[int, float], devices: int) -> float:
    return least_seconds(counts, ends_of(counts), dict.fromkeys(schemes, devices), devices)


def seconds_of(made: Strategy, counts: Mapping[int, float]) -> float:
    """Return the least seconds that the pipelines of a strategy need."""
    return least_seconds(counts, ends_of(counts), Counter(made.pipelines), made.devices)


def ends_of(counts: Mapping[int, float]) -> list[int]:
    return [*range(0, max(counts), STEP), max(counts)]


def home_of(devices: int) -> Strategy:
    return Strategy((Scheme(devices, 1, TimeFit(0.0, 1.0), 500),))


@settings(max_examples=100)
@given(small_schemes(), small_counts, st.integers(4, 5))
def test_the_strategy_of_the_longest_sequence_equals_enumeration(
    schemes: tuple[Scheme, ...], counts: dict[int, float], devices: int
) -> None:
    pool = propose(schemes, counts, home_of(devices), step=STEP)
    made = pool.strategy_for(max(counts))
    assert made.devices <= devices
    assert made.max_length >= max(counts)
    assert seconds_of(made, counts) == pytest.approx(best_of_all(schemes, counts, devices), rel=1e-9)


@settings(max_examples=30)
@given(small_schemes(), small_counts)
def test_shorter_batches_get_the_strategy_of_the_shorter_histogram(
    schemes: tuple[Scheme, ...], counts: dict[int, float]
) -> None:
    pool = propose(schemes, counts, home_of(4), step=STEP)
    for longest, made in pool.proposed[:-1]:
        part = {length: count for length, count in counts.items() if length <= longest} | {
            longest: counts.get(longest, 0)
        }
        assert seconds_of(made, part) == pytest.approx(best_of_all(schemes, part, 4), rel=1e-9)


def published_counts() -> dict[int, float]:
    """Return a long-tailed histogram, as many texts have."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 1.3, 5000), 32, 32768).astype(int)
    values, counts = np.unique(lengths, return_counts=True)
    return dict(zip(values.tolist(), (counts / 25.0).tolist(), strict=True))


def test_a_long_tail_gets_a_few_large_pipelines_and_the_rest_small_ones() -> None:
    pool = propose(tuple(SCHEMES.values()), published_counts(), POOL[0], step=1024)
    largest = [scheme for scheme in pool.strategy_for(32768).pipelines if scheme.max_length >= 32768]
    assert 1 <= len(largest) <= 2
    assert len(pool.strategy_for(32768).pipelines) >= 8
    assert pool.strategy_for(1000).max_length < 32768


def test_the_pool_holds_every_length_and_starts_with_the_optimizer_strategy() -> None:
    pool = propose(tuple(SCHEMES.values()), published_counts(), POOL[0], step=1024)
    assert pool.strategies[0] == pool.home == POOL[0]
    assert len(set(pool.strategies)) == len(pool.strategies)
    assert [length for length, _ in pool.proposed] == [
        *range(1024, max(published_counts()), 1024),
        max(published_counts()),
    ]


def test_the_order_of_schemes_and_counts_does_not_matter() -> None:
    counts = published_counts()
    backwards = dict(reversed(counts.items()))
    first = propose(tuple(SCHEMES.values()), counts, POOL[0], step=2048)
    assert first == propose(tuple(reversed(SCHEMES.values())), backwards, POOL[0], step=2048)


def test_a_length_that_no_scheme_holds_is_refused() -> None:
    with pytest.raises(PlanError, match="no scheme of at most 64 devices holds 50000 tokens, only up to 43520"):
        propose(tuple(SCHEMES.values()), {50000: 1.0}, POOL[0])
    with pytest.raises(PlanError, match="no scheme of at most 8 devices holds 30000 tokens, only up to 21888"):
        propose(tuple(SCHEMES.values()), {30000: 1.0}, strategy((1, (8, 1))))


@pytest.mark.parametrize(
    ("counts", "step"), [({}, 1), ({5: -1.0}, 1), ({0: 1.0}, 1), ({5: math.nan}, 1), ({5: 1.0}, 0)]
)
def test_counts_that_cannot_be_are_refused(counts: dict[int, float], step: int) -> None:
    with pytest.raises(PlanError, match="cannot propose"):
        propose(tuple(SCHEMES.values()), counts, POOL[0], step=step)


def test_pools_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="mixes schemes"):
        StrategyPool(POOL[1], ())
    with pytest.raises(PlanError, match="growing lengths"):
        StrategyPool(POOL[0], ((200, POOL[1]), (100, POOL[1])))
    with pytest.raises(PlanError, match="holds 12416 and takes 64"):
        StrategyPool(POOL[0], ((20000, POOL[6]),))
    with pytest.raises(PlanError, match="only up to 100; cut them"):
        StrategyPool(POOL[0], ((100, POOL[6]),)).strategy_for(101)
