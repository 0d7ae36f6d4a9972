from collections.abc import Sequence
from itertools import combinations, pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.planner.search.allocate import Seconds, min_max_ranges, spread


def lines(numbers: Sequence[tuple[int, int]]) -> list[Seconds]:
    return [lambda count, a=a, b=b: a + b * count for a, b in numbers]


def brute_force_spread(total: int, costs: Sequence[Seconds], low: Sequence[int], high: Sequence[int]) -> float | None:
    ranges = [range(a, b + 1) for a, b in zip(low, high, strict=True)]
    legal = [counts for counts in product(*ranges) if sum(counts) == total]
    return min((max(c(n) for c, n in zip(costs, x, strict=True)) for x in legal), default=None)


def test_rows_follow_the_speeds() -> None:
    speeds = [4.0, 2.0, 1.0, 1.0]
    assert spread(16, [lambda n, s=s: n / s for s in speeds]) == (8, 4, 2, 2)


def test_min_max_beats_the_largest_remainder() -> None:
    # shares 6.75 and 2.25 of 9 round to 7 and 2; a fixed cost of the first makes 6 and 3 the better one
    assert spread(9, lines([(3, 1), (0, 3)])) == (6, 3)


def test_limits_that_allow_nothing_give_none() -> None:
    costs = lines([(0, 1), (0, 1)])
    assert spread(5, costs, high=[2, 2]) is None
    assert spread(1, costs, low=[1, 1]) is None
    assert spread(3, costs, low=[2, 0], high=[1, 3]) is None


def test_a_receiver_that_never_finishes_gets_nothing() -> None:
    assert spread(4, [lambda n: n, lambda n: float("inf") if n else 0.0]) == (4, 0)


@settings(max_examples=200)
@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.data(),
)
def test_spread_equals_brute_force(total: int, numbers: list[tuple[int, int]], data: st.DataObject) -> None:
    limits = st.lists(st.integers(0, 6), min_size=len(numbers), max_size=len(numbers))
    low, high = data.draw(limits), data.draw(limits)
    costs = lines(numbers)
    best = brute_force_spread(total, costs, low, high)
    found = spread(total, costs, low=low, high=high)
    assert (found is None) == (best is None)
    if found is not None:
        assert sum(found) == total
        assert all(a <= n <= b for a, n, b in zip(low, found, high, strict=True))
        assert max(c(n) for c, n in zip(costs, found, strict=True)) == best


def brute_force_cut(sizes: Sequence[int], speeds: Sequence[int], fixed: Sequence[int]) -> float | None:
    bests = []
    for inner in combinations(range(1, len(sizes)), len(speeds) - 1):
        stops = (0, *inner, len(sizes))
        ranges = pairwise(stops)
        bests.append(max(fixed[i] + speeds[i] * sum(sizes[a:b]) for i, (a, b) in enumerate(ranges)))
    return min(bests, default=None)


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
)
def test_cut_equals_brute_force(sizes: list[int], stages: list[tuple[int, int]]) -> None:
    speeds, fixed = [s for s, _ in stages], [f for _, f in stages]

    def seconds(stage: int, start: int, stop: int) -> float:
        return fixed[stage] + speeds[stage] * sum(sizes[start:stop])

    found = min_max_ranges(len(sizes), len(stages), seconds)
    best = brute_force_cut(sizes, speeds, fixed)
    assert (found is None) == (best is None)
    if found is not None:
        stops = [sum(found[:i]) for i in range(len(found) + 1)]
        assert min(found) >= 1
        assert stops[-1] == len(sizes)
        assert max(seconds(i, stops[i], stops[i + 1]) for i in range(len(found))) == best


def test_slow_stages_get_fewer_blocks() -> None:
    rates = [7.22, 3.66, 1.9, 1.0, 1.0]  # Malleus' recorded 70B pipeline with one straggler suspended
    assert min_max_ranges(80, 5, lambda i, start, stop: rates[i] * (stop - start)) is not None
    blocks = min_max_ranges(80, 5, lambda i, start, stop: rates[i] * (stop - start))
    assert max(r * b for r, b in zip(rates, blocks or (), strict=True)) == 28.0


def test_a_stage_that_fits_nowhere_gives_none() -> None:
    assert min_max_ranges(4, 2, lambda stage, start, stop: float("inf") if stage else 1.0) is None
    assert min_max_ranges(1, 2, lambda stage, start, stop: 1.0) is None
