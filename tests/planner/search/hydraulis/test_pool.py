import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.published_hydraulis import SCHEMES
from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.scheme_costs import Scheme, Strategy, TimeFit
from hetu_fx.planner.search.hydraulis.pool import LengthVariant, propose

STEP = 100


@st.composite
def small_schemes(draw: st.DrawFn, kinds: int = 1) -> tuple[Scheme, ...]:
    """Draw up to three schemes; the first holds everything, on up to four devices."""
    constants = st.integers(0, 20)
    most = (500, draw(st.integers(1, 500)), draw(st.integers(1, 500)))
    made = []
    for n in most:
        times = TimeFit(draw(constants) / 1e4, 1.0, draw(constants))
        counts = draw(st.sampled_from([(1, 0), (0, 1), (1, 1), (2, 0)])) if kinds == 2 else ()
        group = sum(counts) or draw(st.integers(1, 2))
        made.append(Scheme(group, draw(st.integers(1, 2)), times, n, kinds=counts))
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
    counts: Mapping[int, float], ends: Sequence[int], pipelines: Mapping[Scheme, int], devices: tuple[int, ...]
) -> float:
    """Enumerate all cuts into intervals, with at most so many pipelines of each scheme, and so many devices."""
    if len(ends) == 1:
        return 0.0
    found = [math.inf]
    for scheme, most in pipelines.items():
        pairs = zip(devices, scheme.by_kind, strict=True)
        fitting = min(most, *(given // taken for given, taken in pairs if taken))
        for count in range(1, fitting + 1) if scheme.max_length >= ends[-1] else ():
            left = {**pipelines, scheme: most - count}
            rest = tuple(given - count * taken for given, taken in zip(devices, scheme.by_kind, strict=True))
            for cut in range(1, len(ends)):
                before = least_seconds(counts, ends[:cut], left, rest)
                found.append(max(before, interval_seconds(scheme, count, counts, ends[cut - 1], ends[-1])))
    return min(found)


def best_of_all(schemes: Sequence[Scheme], counts: Mapping[int, float], *devices: int) -> float:
    return least_seconds(counts, ends_of(counts), dict.fromkeys(schemes, sum(devices)), devices)


def seconds_of(made: Strategy, counts: Mapping[int, float]) -> float:
    """Return the least seconds that the pipelines of a strategy need."""
    taken = tuple(map(sum, zip(*(scheme.by_kind for scheme in made.pipelines), strict=True)))
    return least_seconds(counts, ends_of(counts), Counter(made.pipelines), taken)


def ends_of(counts: Mapping[int, float]) -> list[int]:
    return [*range(0, max(counts), STEP), max(counts)]


def strategy_for(longest: int, pool: Sequence[LengthVariant]) -> Strategy:
    return next(variant.strategy for variant in pool if variant.longest >= longest)


@settings(max_examples=100)
@given(small_schemes(), small_counts, st.integers(4, 5))
def test_the_strategy_of_the_longest_sequence_equals_enumeration(
    schemes: tuple[Scheme, ...], counts: dict[int, float], devices: int
) -> None:
    pool = propose(schemes, counts, devices, step=STEP)
    made = strategy_for(max(counts), pool)
    assert sum(one.devices for one in made.pipelines) <= devices
    assert made.max_length >= max(counts)
    assert seconds_of(made, counts) == pytest.approx(best_of_all(schemes, counts, devices), rel=1e-9)


@settings(max_examples=50)
@given(small_schemes(kinds=2), small_counts, st.integers(2, 3), st.integers(2, 3))
def test_of_two_kinds_of_devices_no_more_are_taken_than_there_are_and_none_better(
    schemes: tuple[Scheme, ...], counts: dict[int, float], fast: int, slow: int
) -> None:
    holding = [s for s in schemes if s.max_length >= max(counts) and s.by_kind[0] <= fast and s.by_kind[1] <= slow]
    if not holding:
        with pytest.raises(PlanError, match=rf"no scheme of at most {fast} \+ {slow} devices holds"):
            propose(schemes, counts, (fast, slow), step=STEP)
        return
    made = strategy_for(max(counts), propose(schemes, counts, (fast, slow), step=STEP))
    taken = [sum(scheme.by_kind[kind] for scheme in made.pipelines) for kind in (0, 1)]
    assert taken[0] <= fast
    assert taken[1] <= slow
    assert seconds_of(made, counts) == pytest.approx(best_of_all(schemes, counts, fast, slow), rel=1e-9)


@settings(max_examples=30)
@given(small_schemes(), small_counts)
def test_shorter_batches_get_the_strategy_of_the_shorter_histogram(
    schemes: tuple[Scheme, ...], counts: dict[int, float]
) -> None:
    pool = propose(schemes, counts, 4, step=STEP)
    for longest, made in ((variant.longest, variant.strategy) for variant in pool[:-1]):
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
    pool = propose(tuple(SCHEMES.values()), published_counts(), 64, step=1024)
    largest = [scheme for scheme in strategy_for(32768, pool).pipelines if scheme.max_length >= 32768]
    assert 1 <= len(largest) <= 2
    assert len(strategy_for(32768, pool).pipelines) >= 8
    assert strategy_for(1000, pool).max_length < 32768


def test_the_pool_holds_every_length() -> None:
    pool = propose(tuple(SCHEMES.values()), published_counts(), 64, step=1024)
    assert all(variant.strategy.max_length >= variant.longest for variant in pool)
    assert all(sum(one.devices for one in variant.strategy.pipelines) <= 64 for variant in pool)
    assert [variant.longest for variant in pool] == [
        *range(1024, max(published_counts()), 1024),
        max(published_counts()),
    ]


def test_the_order_of_schemes_and_counts_does_not_matter() -> None:
    counts = published_counts()
    backwards = dict(reversed(counts.items()))
    first = propose(tuple(SCHEMES.values()), counts, 64, step=2048)
    assert first == propose(tuple(reversed(SCHEMES.values())), backwards, 64, step=2048)


def test_a_length_that_no_scheme_holds_is_refused() -> None:
    with pytest.raises(PlanError, match="no scheme of at most 64 devices holds 50000 tokens, only up to 43520"):
        propose(tuple(SCHEMES.values()), {50000: 1.0}, 64)
    with pytest.raises(PlanError, match="no scheme of at most 8 devices holds 30000 tokens, only up to 21888"):
        propose(tuple(SCHEMES.values()), {30000: 1.0}, 8)


@pytest.mark.parametrize(
    ("counts", "step"), [({}, 1), ({5: -1.0}, 1), ({0: 1.0}, 1), ({5: math.nan}, 1), ({5: 1.0}, 0)]
)
def test_counts_that_cannot_be_are_refused(counts: dict[int, float], step: int) -> None:
    with pytest.raises(PlanError, match="cannot propose"):
        propose(tuple(SCHEMES.values()), counts, 64, step=step)
