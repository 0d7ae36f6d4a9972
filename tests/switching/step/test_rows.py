"""Which rows each rank brings and each pipeline and micro-batch takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.annotations.annotation import Annotation, Duplicate, Sharding, Split
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching.step.rows import RowPlan, at_pipelines, at_ranks, at_readers, plan_rows

TWO = Plan((Pipeline((Stage((0, 1)),), share=3, micro_batches=2), Pipeline((Stage((2,)),), share=1)))
ROWS_BY_RANK = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)


def read_at(plan: Plan, rows: RowPlan) -> Annotation:
    groups = [pipeline.devices for pipeline in plan.pipelines]
    return at_pipelines(groups, [Sharding((Duplicate(len(group)),)) for group in groups], 0, rows)


def joined(intervals: tuple[range, ...]) -> list[int]:
    return [row for interval in intervals for row in range(interval.start, interval.stop)]


def test_pipelines_take_rows_by_their_shares_and_micro_batches_cut_them() -> None:
    rows = plan_rows(TWO, (3, 3, 2), shared=False)
    assert rows.owned == (range(0, 3), range(3, 6), range(6, 8))
    assert rows.pipelines == (range(0, 6), range(6, 8))
    assert rows.micro_batches == ((range(0, 3), range(3, 6)), (range(6, 8),))


@given(ROWS_BY_RANK, st.booleans())
def test_every_row_is_taken_once_and_in_order(owned: list[int], shared: bool) -> None:
    rows = plan_rows(TWO, tuple([owned[0]] * 3 if shared else owned), shared=shared)
    assert joined(rows.pipelines) == list(range(rows.total))
    for pipeline, micro_batches in zip(rows.pipelines, rows.micro_batches, strict=True):
        assert joined(micro_batches) == joined((pipeline,))


def test_shared_rows_are_owned_whole_by_every_rank() -> None:
    rows = plan_rows(TWO, (8, 8, 8), shared=True)
    assert rows.owned == (range(0, 8),) * 3
    assert rows.total == 8


def test_a_rank_without_rows_holds_nothing_of_the_batch() -> None:
    rows = plan_rows(TWO, (5, 0, 3), shared=False)
    assert at_ranks(rows, 0, shared=False) == Annotation.on((0, 1, 2), Split(0, (5, 0, 3)))
    assert at_ranks(rows, 0, shared=False).local_shape(1, (8, 4)) == (0, 4)


def test_every_device_of_a_pipeline_reads_all_its_rows() -> None:
    target = read_at(TWO, plan_rows(TWO, (3, 3, 2), shared=False))
    assert [target.local_shape(rank, (8, 4)) for rank in (0, 1, 2)] == [(6, 4), (6, 4), (2, 4)]


def test_rows_go_to_those_devices_of_a_pipeline_that_read_them() -> None:
    rows = plan_rows(TWO, (3, 3, 2), shared=False)
    target = at_readers(TWO, frozenset({1, 2}), 0, rows)
    assert [target.holds(rank) for rank in (0, 1, 2)] == [False, True, True]
    assert [target.local_shape(rank, (8, 4)) for rank in (1, 2)] == [(6, 4), (2, 4)]
    assert at_readers(TWO, frozenset({2}), 0, rows) == at_readers(TWO, None, 0, rows) == read_at(TWO, rows)


def test_few_rows_leave_pipelines_and_micro_batches_empty() -> None:
    rows = plan_rows(TWO, (1, 0, 0), shared=False)
    assert [len(interval) for interval in rows.pipelines] == [1, 0]
    assert [[len(interval) for interval in micro] for micro in rows.micro_batches] == [[1, 0], [0]]


def test_one_rank_brings_and_reads_everything() -> None:
    rows = plan_rows(Plan.single(), (4,), shared=False)
    assert rows == RowPlan((range(0, 4),), (range(0, 4),), ((range(0, 4),),))
    assert at_ranks(rows, 0, shared=False) == read_at(Plan.single(), rows) == Annotation.on((0,))
