from dataclasses import replace

from hetu_fx.planner.make_plan import make_plan
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import DeviceCost, Prediction, device_rows
from tests.planner.examples import paper, transformer


def test_every_device_has_its_share_its_memory_of_the_limit_and_how_busy_it_is() -> None:
    stages = (Stage((0, 2), (3, 1), blocks=3), Stage((4,), blocks=1))
    seconds = (("compute", 0.75), ("idle", 0.25))
    costs = (
        DeviceCost(0, seconds, (("parameters", 2_000_000),), 8_000_000),
        DeviceCost(4, (("compute", 0.5), ("idle", 0.5)), (("parameters", 1_000_000),)),
        DeviceCost(5, (), ()),
    )
    plan = Plan((Pipeline(stages, share=3), Pipeline((Stage((5,)),))), predicted=Prediction(1.0, costs))
    assert list(device_rows(plan)) == [
        ["0", "0.0", "75 %", "75 %", "3", "2 of 8 (25 %)", "75 %"],
        ["4", "0.1", "75 %", "100 %", "1", "1", "50 %"],
        ["5", "1.0", "25 %", "100 %", "even", "0", ""],
    ]


def test_the_shard_of_a_device_in_a_grid_is_its_part_of_both() -> None:
    stage = Stage((0, 1, 2, 3), (2, 1), context=2, context_ratios=(3, 1))
    costs = tuple(DeviceCost(rank, (), ()) for rank in range(4))
    rows = device_rows(Plan((Pipeline((stage,)),), predicted=Prediction(1.0, costs)))
    assert [row[3] for row in rows] == ["50 %", "25 %", "17 %", "8 %"]


def test_a_plan_without_prediction_has_no_rows() -> None:
    assert list(device_rows(Plan.single())) == []


def test_a_plan_that_was_made_explains_itself_the_same_after_reading_it_again() -> None:
    plan = make_plan(transformer(), paper(4, 2, memory_bytes=10**9))
    text = plan.explain()
    assert "of 1000 (" in text
    assert "runner-up: " in text
    assert "%)" in text.splitlines()[-1]
    assert Plan.from_json(plan.to_json()).explain() == text
    assert "memory MB" not in replace(plan, predicted=None).explain()
