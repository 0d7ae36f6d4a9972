"""What the papers' systems are compared with in the benchmarks' ladders."""

from dataclasses import replace

import pytest

from benchmarks.cases.published_malleus import LLAMA_32B, LLAMA_70B
from benchmarks.ladder_hydraulis import LONGEST, SCHEMES, batch, homogeneous_seconds, packed_rows
from benchmarks.ladder_malleus import measure, restarted, situations
from hetu_fx.planner.dispatch.scheme_costs import SequenceBatch


def test_rows_hold_every_sequence_once_within_the_context() -> None:
    lengths = batch(0).lengths
    rows = packed_rows(lengths)
    assert sorted(length for row in rows for length in row) == sorted(lengths)
    assert max(map(sum, rows)) <= LONGEST


def test_equal_pipelines_take_as_long_as_the_one_with_most_rows() -> None:
    scheme = SCHEMES[16, 1]
    full = float(scheme.times.all_seconds([LONGEST]).sum()) + scheme.times.c
    assert homogeneous_seconds(scheme, SequenceBatch((LONGEST,) * 4)) == full
    assert homogeneous_seconds(scheme, SequenceBatch((LONGEST,) * 5)) == 2 * full


def test_gains_are_over_what_the_slowest_device_makes_of_equal_stages() -> None:
    rows = list(measure("32B", LLAMA_32B))
    assert len(rows) == len(list(situations()))
    for row in rows:
        ours, equal, gain = (float(str(row[key])) for key in ("ours / healthy", "equal stages / healthy", "gain"))
        assert 1 <= ours < equal
        assert gain == pytest.approx(equal / ours)


def test_a_restart_runs_the_best_equal_pipelines_that_fit() -> None:
    assert restarted(LLAMA_70B.situation({})) == 1.9 * 64 / 4 * 80 / 4  # 4 pipelines of 4 groups of 4
    left = replace(LLAMA_70B, devices=56).situation({})
    assert restarted(left) == pytest.approx(1.9 * 64 / 2 * 12)  # 7 stages hold 12 of 80 layers at most
    ample = replace(replace(LLAMA_70B, devices=8).situation({}), memory=None)
    assert restarted(ample) == 64 * 80 * 7.22 / 8  # groups of 1 lose the least
