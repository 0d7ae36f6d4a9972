"""Nothing gets below what a sequence adds to rows, whatever attention is paid for, and little is lost to it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.planner.dispatch.row_dispatch import dispatch_rows, least_done, least_seconds, pack_whole_rows
from hetu_fx.planner.dispatch.scheme_costs import Scheme, TimeFit

HELD = 64
times = st.builds(TimeFit, a=st.sampled_from([0.0, 0.01, 0.1]), b=st.just(1.0), c=st.sampled_from([0.0, 1.0, 30.0]))
schemes = st.builds(Scheme, st.just(1), st.integers(1, 3), times, st.just(HELD))
few_lengths = st.lists(st.integers(1, HELD), min_size=1, max_size=6)


def seconds(scheme: Scheme, rows: list[list[int]], whole_rows: bool = True) -> float:
    runs = [[sum(row)] if whole_rows else row for row in rows]
    each = [scheme.times.micro_batch_seconds(one) for one in runs]
    return math.fsum(each) + (scheme.stages - 1) * max(each)


def every_rows(lengths: list[int]) -> Iterator[list[list[int]]]:
    """Yield the sequences of the rows of every way to share rows."""
    if not lengths:
        yield []
        return
    first, *others = lengths
    for rows in every_rows(others):
        yield [[first], *rows]
        for i in range(len(rows)):
            yield [*rows[:i], [*rows[i], first], *rows[i + 1 :]]


def best(scheme: Scheme, lengths: list[int], whole_rows: bool = True) -> float:
    fitting = (rows for rows in every_rows(lengths) if max(map(sum, rows)) <= HELD)
    return min(seconds(scheme, rows, whole_rows) for rows in fitting)


@given(schemes, few_lengths, st.booleans())
def test_no_rows_take_less_than_what_their_sequences_add(scheme: Scheme, lengths: list[int], whole_rows: bool) -> None:
    each = least_seconds(scheme, lengths, whole_rows=whole_rows)
    assert each.sum() + (scheme.stages - 1) * each.max() <= best(scheme, lengths, whole_rows) * (1 + 1e-9)


@given(schemes, few_lengths)
def test_rows_hold_every_sequence_once_and_are_nearly_the_best(scheme: Scheme, lengths: list[int]) -> None:
    rows = pack_whole_rows(scheme, lengths)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    placed = [[lengths[i] for i in row] for row in rows]
    assert max(map(sum, placed)) <= HELD
    assert seconds(scheme, placed) <= 1.35 * best(scheme, lengths)


def test_rows_are_as_long_as_makes_up_for_a_micro_batch() -> None:
    scheme = Scheme(1, 1, TimeFit(a=1.0, b=1.0, c=16.0), HELD)
    widths = sorted(len(row) for row in pack_whole_rows(scheme, [1] * 12))
    assert widths == [4, 4, 4], "a token costs w + 16 / w in a row of w"


def test_a_pipeline_without_sequences_has_no_rows() -> None:
    assert pack_whole_rows(Scheme(1, 1, TimeFit(0.0, 1.0), HELD), []) == ()


@given(st.lists(schemes, min_size=1, max_size=3), st.lists(st.integers(1, 2 * HELD), min_size=1, max_size=20))
def test_sequences_go_to_pipelines_that_hold_them(pipelines: list[Scheme], lengths: list[int]) -> None:
    wide = Scheme(2, 1, TimeFit(0.0, 2.0), 2 * HELD)
    groups = dispatch_rows([*pipelines, wide], lengths, seed=0, whole_rows=True)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(lengths[i] <= HELD for group in groups[:-1] for i in group)


@given(st.lists(schemes, min_size=1, max_size=2), st.lists(st.integers(1, HELD), min_size=1, max_size=5), st.data())
def test_no_dispatch_is_done_before_the_bound(pipelines: list[Scheme], lengths: list[int], data: st.DataObject) -> None:
    whole_rows = data.draw(st.booleans())
    indices = st.integers(0, len(pipelines) - 1)
    receivers = data.draw(st.lists(indices, min_size=len(lengths), max_size=len(lengths)))
    groups = [[length for length, to in zip(lengths, receivers, strict=True) if to == i] for i in range(len(pipelines))]
    done = max(best(scheme, group, whole_rows) for scheme, group in zip(pipelines, groups, strict=True) if group)
    assert least_done(pipelines, lengths, whole_rows=whole_rows) <= done * (1 + 1e-9)


def test_pipelines_are_done_at_the_same_time() -> None:
    slow, fast = (Scheme(1, 1, TimeFit(a=0.0, b=b), HELD) for b in (3.0, 1.0))
    slow_group, fast_group = dispatch_rows([slow, fast], [1] * 40, seed=0, whole_rows=True)
    assert (len(slow_group), len(fast_group)) == (10, 30)


@pytest.mark.parametrize("length", [1, HELD])
def test_what_a_sequence_adds_is_of_the_row_that_suits_it(length: int) -> None:
    scheme = Scheme(1, 1, TimeFit(a=1.0, b=1.0, c=16.0), HELD)
    width = max(4, length)
    assert least_seconds(scheme, [length], whole_rows=True)[0] == pytest.approx(length * (width + 1 + 16 / width))
    assert least_seconds(scheme, [length], whole_rows=False)[0] == pytest.approx(length * (length + 1 + 16 / HELD))
