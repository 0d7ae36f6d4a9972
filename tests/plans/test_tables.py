"""Plans as tables: what is alike stands in one row, and 1,024 devices fit a screen of 80 columns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.planner.make_plan import make_plan
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import DeviceCost, Prediction
from hetu_fx.plans.tables import busiest, device_rows, left_out_text, plan_table, sentence, short_text
from tests.planner.examples import paper, transformer


def of_many(pipelines: int, stages: int, size: int = 1) -> Plan:
    """Return equal pipelines of stages of `size` devices and a block."""
    starts = (range(i * stages * size, (i + 1) * stages * size, size) for i in range(pipelines))
    made = (tuple(Stage(tuple(range(at, at + size)), blocks=1) for at in own) for own in starts)
    return Plan(tuple(Pipeline(own, micro_batches=8) for own in made))


def priced(plan: Plan, limit: int = 8_000_000) -> Plan:
    """Return the plan with seconds and bytes by device: those of higher rank wait more and hold less."""
    count = len(plan.devices)
    costs = (
        DeviceCost(r, (("compute", 1 - r / count), ("idle", r / count)), (("parameters", 4_000_000 - r),), limit)
        for r in range(count)
    )
    return replace(plan, predicted=Prediction(1.0, tuple(costs)))


def own(plan: Plan) -> tuple[tuple[Pipeline, ...], Prediction | None]:
    return plan.pipelines, plan.predicted


def test_every_device_has_its_share_its_memory_of_the_limit_and_how_busy_it_is() -> None:
    stages = (Stage((0, 2), (3, 1), blocks=3), Stage((4,), blocks=1))
    seconds = (("compute", 0.75), ("idle", 0.25))
    costs = (
        DeviceCost(0, seconds, (("parameters", 2_000_000),), 8_000_000),
        DeviceCost(4, (("compute", 0.5), ("idle", 0.5)), (("parameters", 1_000_000),)),
        DeviceCost(5, (), ()),
    )
    plan = Plan((Pipeline(stages, share=3), Pipeline((Stage((5,)),))), predicted=Prediction(1.0, costs))
    assert list(device_rows(*own(plan))) == [
        ["0", "0", "0", "75 %", "75 %", "2 of 8 MB (25 %)", "75 %"],
        ["4", "0", "1", "75 %", "100 %", "1 MB", "50 %"],
        ["5", "1", "0", "25 %", "100 %", "0 bytes", ""],
    ]


def test_the_shard_of_a_device_in_a_grid_is_its_part_of_both() -> None:
    stage = Stage((0, 1, 2, 3), (2, 1), context=2, context_ratios=(3, 1))
    costs = tuple(DeviceCost(rank, (), ()) for rank in range(4))
    rows = device_rows((Pipeline((stage,)),), Prediction(1.0, costs))
    assert [row[4] for row in rows] == ["50 %", "25 %", "17 %", "8 %"]


def test_a_plan_without_prediction_has_no_rows() -> None:
    assert list(device_rows(*own(Plan.single()))) == []


def test_pipelines_that_are_alike_stand_in_one_row() -> None:
    alone = (Pipeline((Stage((rank,)),), share=3) for rank in (0, 1))
    plan = Plan((*alone, Pipeline((Stage((2, 3), (2, 1)),), share=2)))
    assert plan_table(plan.pipelines).splitlines()[1:] == [
        "0, 1      3     1              0      0 | 1    1       even",
        "2         2     1              0      2,3      2:1     even",
    ]


def test_of_many_devices_like_stages_stand_in_one_row_too_which_tells_the_most_memory_and_the_busiest() -> None:
    plan = priced(of_many(4, 4, size=2))
    assert plan_table(plan.pipelines).splitlines()[1:] == ["0-3       1     8              0-3    0-31 by 2  1:1     1"]
    assert list(device_rows(*own(plan))) == [["0-31", "0-3", "0-3", "25 %", "50 %", "4 of 8 MB (50 %)", "3-100 %"]]
    assert busiest(*own(plan)) == [0]


def test_devices_of_unlike_memory_are_told_apart() -> None:
    plan = priced(of_many(4, 4))
    assert plan.predicted is not None
    first, *others = plan.predicted.devices
    less = replace(plan.predicted, devices=(replace(first, limit_bytes=5_000_000), *others))
    assert [row[0] for row in device_rows(*own(replace(plan, predicted=less)))] == ["0", "1-15"]


@pytest.mark.parametrize(("pipelines", "stages"), [(32, 32), (512, 2), (1, 32), (6, 8)])
def test_many_devices_are_explained_within_a_screen(pipelines: int, stages: int) -> None:
    lines = priced(of_many(pipelines, stages)).explain().splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80


def test_the_devices_that_a_plan_leaves_out_are_told_in_a_line() -> None:
    plan = replace(Plan.single(), predicted=Prediction(1.0, left_out=(1, 2, 3)))
    assert list(left_out_text(*own(plan))) == ["left out: 3 of 4 devices, 1-3"]
    assert "\nleft out: 3 of 4 devices" in plan.explain()
    assert list(left_out_text(*own(Plan.data_parallel([0, 1])), range(2))) == []
    every_other = range(0, 1024, 2)
    (line,) = left_out_text(*own(Plan.data_parallel(every_other)), range(1024))
    assert line == "left out: 512 of 1024 devices, 1 ... 1023 (512)"
    assert "left out: 1 of 2 devices, 1" in Plan.single().explain(range(2))


def test_a_plan_is_told_in_a_sentence() -> None:
    assert sentence(*own(Plan.single())) == "device 0 computes each batch"
    assert sentence(*own(Plan.single()), range(4)) == "1 of 4 devices computes each batch"
    assert sentence(*own(Plan.data_parallel([0, 1], [3, 1])), range(4)) == (
        "2 of 4 devices compute each batch: 2 replicas with rows 3:1"
    )
    assert sentence(*own(of_many(32, 4))) == "128 devices compute each batch: 32 replicas, 4 stages"
    assert sentence(*own(Plan.data_parallel(range(9), [1] * 8 + [2]))).endswith(
        "9 replicas with rows from 1 to 2 of 10"
    )
    predicted = Prediction(0.5, left_out=(1, 2), left_out_why=("1, 2 (slow): with them a step takes 1 s",))
    plan = replace(Plan.single(), predicted=predicted)
    assert sentence(*own(plan)) == "1 of 3 devices computes each batch in 500 ms (predicted)"
    assert list(left_out_text(*own(plan))) == ["left out: 2 of 3 devices, 1, 2", f"- {predicted.left_out_why[0]}"]


def test_a_short_text_counts_what_is_alike() -> None:
    assert short_text(of_many(32, 32).pipelines) == "32 x 1 row in 8: 32 x [1 device]x1"
    uneven = Plan((Pipeline((Stage(tuple(range(8)), (2,) * 7 + (1,), blocks=3), Stage((8,), blocks=1))),))
    assert short_text(uneven.pipelines) == "1 row: [8 devices 2:2:2:2:2:2:2:1]x3 > [1 device]x1"
    assert short_text(Plan.data_parallel([0, 1]).pipelines) == "1 row: [0] | 1 row: [1]"


def test_a_plan_that_was_made_explains_itself_the_same_after_reading_it_again() -> None:
    plan = make_plan(transformer(), paper(4, 2, memory_bytes=10**9))
    text = plan.explain()
    assert "left out" not in text
    assert "of 1 GB (" in text
    assert "runner-up: " in text
    assert "%)" in text.splitlines()[-2]
    assert Plan.from_json(plan.to_json()).explain() == text
    assert "memory" not in replace(plan, predicted=None).explain()
