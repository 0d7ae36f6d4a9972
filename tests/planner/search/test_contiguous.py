import math

from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.planner.price.stage_seconds import pipeline_seconds
from hetu_fx.planner.search.contiguous import DeadlineTable, Option
from hetu_fx.planner.search.replica import Passing, Replica
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Pipeline, Stage
from tests.planner.examples import FAST_LINK

LINES = st.builds(Line, st.integers(0, 5), st.integers(0, 5))


def option(lines: list[Line], micro_batches: int, most: int, end: float) -> Option:
    pipeline = Pipeline(tuple(Stage((i,)) for i in range(len(lines))))
    edges = (Line(),) * (len(lines) - 1)
    return Option((0, 1), Replica(pipeline, (), Passing.of(lines, edges, "1f1b")), micro_batches, most, end)


def most_by_trying(one: Option, deadline: float, total: int) -> int:
    """Return the most rows, tried one by one, that are a multiple of the micro-batches, or single rows."""
    m = one.micro_batches
    tried = [n for n in range(1, total + 1) if n <= m or n % m == 0 or n == total]
    fitting = [
        n
        for n in tried
        if math.ceil(n / min(n, m)) <= one.most_micro_rows
        and pipeline_seconds(one.replica.lines, n, m) + one.end_seconds <= deadline
    ]
    return max(fitting, default=0)


@settings(max_examples=300)
@given(
    st.lists(LINES, min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 120),
)
def test_most_rows_equal_trying_them_all(
    lines: list[Line], micro_batches: int, most: int, end: int, deadline: int
) -> None:
    one = option(lines, micro_batches, most, end)
    total = 12
    found = int(DeadlineTable([one], total).most_rows(deadline)[0])
    assert found == most_by_trying(one, deadline, total)


def test_the_best_option_of_each_segment_is_named() -> None:
    slow, fast = option([Line(0, 2)], 1, 99, 0.0), option([Line(0, 1)], 1, 99, 0.0)
    assert DeadlineTable([slow, fast], 100).best(10.0) == {(0, 1): (10, 1)}
    assert DeadlineTable([slow, fast], 100).best(0.5) == {}
    assert DeadlineTable([], 100).best(1.0) == {}
    assert FAST_LINK.seconds(0) > 0
