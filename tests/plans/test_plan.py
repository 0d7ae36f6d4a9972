import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.cli.what_if import diff
from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Pipeline, Plan, Stage, micro_batch_rows, pipeline_rows, plan_in_word, split_rows
from hetu_fx.plans.prediction import DeviceCost, Prediction
from hetu_fx.plans.stage import STAGE

DESIGN_FILE = """
{"format": "hetu_fx.plan/1",
 "pipelines": [
   {"rows": 3, "micro_batches": 2,
    "stages": [{"devices": [0, 1], "ratios": [2, 1], "blocks": 3},
               {"devices": [2], "blocks": 1}]},
   {"rows": 1, "micro_batches": 1,
    "stages": [{"devices": [3], "blocks": 4}]}],
 "schedule": "1f1b", "zero": 1}
"""


def design_plan() -> Plan:
    front = Pipeline((Stage((0, 1), (2, 1), 3), Stage((2,), blocks=1)), share=3, micro_batches=2)
    return Plan((front, Pipeline((Stage((3,), blocks=4),))))


def of_file(text: str, **changes: Any) -> Plan:
    return Plan.from_json(json.loads(text) | changes)


def test_design_file_reads_as_the_plan_it_says() -> None:
    assert of_file(DESIGN_FILE) == design_plan()


def test_what_is_left_out_gets_the_defaults() -> None:
    plan = Plan.from_json({"format": "hetu_fx.plan/1", "pipelines": [{"stages": [{"devices": [0, 1]}]}]})
    assert plan == Plan((Pipeline((Stage((0, 1), (1, 1), None),), share=1, micro_batches=1),), "1f1b", 1)


def test_a_file_may_say_share_and_is_written_with_rows() -> None:
    assert of_file(DESIGN_FILE.replace('"rows"', '"share"')).to_json() == json.loads(DESIGN_FILE)


def test_a_written_plan_reads_back_equal_with_its_prediction(tmp_path: Any) -> None:
    costs = (DeviceCost(0, (("compute", 0.5),), (("parameters", 8),)),)
    prediction = Prediction(0.5, costs, "bound by device 0", "1 row: [0]", 0.75)
    plan = replace(design_plan(), name="long", max_length=512, split=(("*.experts.*", 0),), predicted=prediction)
    plan = replace(plan, sequence_parallel=True)
    plan.write(tmp_path / "plan.json")
    again = Plan.read(tmp_path / "plan.json")
    assert (again, again.predicted) == (plan, prediction)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    Plan.single().write(path)
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        design_plan().write(path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_common_factors_and_even_ratios_have_one_spelling() -> None:
    assert Stage((0, 1), (4, 2)) == Stage((0, 1), (2, 1))
    assert Stage((0, 1), (3, 3)) == Stage((0, 1))
    assert Plan.data_parallel([0, 1], [6, 2]) == Plan.data_parallel([0, 1], [3, 1])
    assert hash(Plan.data_parallel([0, 1], [6, 2])) == hash(Plan.data_parallel([0, 1], [3, 1]))


def test_prediction_takes_no_part_in_equality() -> None:
    assert replace(Plan.single(), predicted=Prediction(1.0)) == Plan.single()


def test_conveniences_build_the_obvious_plans() -> None:
    assert str(Plan.single(2).pipelines[0]) == "[2]"
    assert Plan.data_parallel([0, 1]).summary() == "1 row: [0] | 1 row: [1]"
    assert Plan.tensor_parallel([0, 1], [3, 1]).summary() == "1 row: [0,1 3:1]"
    with pytest.raises(PlanError, match=r"3 shares \[1, 2, 3\] for devices \[0, 1\]"):
        Plan.data_parallel([0, 1], [1, 2, 3])


def test_a_stage_shares_the_sequence_between_all_its_devices_or_none() -> None:
    plan = Plan.context_parallel([0, 1], [3, 1])
    assert plan.summary() == "1 row: [0,1 3:1 context]"
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.to_json()["pipelines"][0]["stages"] == [{"devices": [0, 1], "ratios": [3, 1], "context": 2}]
    assert "3:1 context" in str(plan)
    assert plan != Plan.tensor_parallel([0, 1], [3, 1])
    assert Plan.context_parallel([4]) == Plan.single(4)


def test_tensor_parallel_groups_share_the_sequence_in_a_grid() -> None:
    stage = Stage((4, 0, 2, 1, 5, 3), (2, 4), context=3, context_ratios=(6, 2, 2))
    plan = Plan((Pipeline((stage,)),))
    assert stage.tensor_groups == ((4, 0), (2, 1), (5, 3))
    assert stage.context_groups == ((4, 2, 5), (0, 1, 3))
    assert stage.shares[:3] == ((0.6, 1 / 3), (0.6, 2 / 3), (0.2, 1 / 3))
    assert plan.summary() == "1 row: [4,0,2,1,5,3 1:2 context 3:1:1]"
    assert "1:2 context 3:1:1" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    (written,) = plan.to_json()["pipelines"][0]["stages"]
    assert written == {
        "devices": [4, 0, 2, 1, 5, 3],
        "ratios": [1, 2],
        "context": 3,
        "context_ratios": [3, 1, 1],
    }


def test_even_ratios_of_a_grid_have_one_spelling() -> None:
    even = Stage((0, 1, 2, 3), context=2)
    assert even == Stage((0, 1, 2, 3), (5, 5), context=2, context_ratios=(2, 2))
    assert STAGE.write(even) == {"devices": [0, 1, 2, 3], "context": 2}
    assert str(even) == "[0,1,2,3 context 2]"
    assert even != Stage((0, 1, 2, 3), context=4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"context": 3}, r"devices \[0, 1, 2, 3\] has context 3\nhint: give 4 to .* all of them, a divisor of 4"),
        ({"context": 0}, "has context 0\nhint: give 4"),
        ({"context": 4, "context_ratios": (1, 2, 1, 1)}, "but its context is 4\nhint: give them as 'ratios'"),
        ({"context_ratios": (1, 2)}, "but its context is 1"),
        ({"context": 2, "ratios": (1, 2, 3, 4)}, r"4 ratios \[1, 2, 3, 4\]\nhint: give one per device .* group \(2\)"),
        ({"context": 2, "context_ratios": (1,)}, r"1 context_ratios \[1\]\nhint: give one per part .* \(2\)"),
        ({"context": 2, "context_ratios": (1, 0)}, r"context_ratios \[1, 0\], but each must be at least 1"),
    ],
)
def test_a_grid_that_is_none_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Stage((0, 1, 2, 3), **keys)


def test_the_sequence_of_a_grid_is_not_shared_once_more() -> None:
    grid = Pipeline((Stage((0, 1, 2, 3), context=2),))
    with pytest.raises(PlanError, match=r"sequence_parallel is true, but stage \[0,1,2,3 context 2\] shares"):
        Plan((grid,), sequence_parallel=True)


def test_a_stage_recomputes_some_of_its_blocks() -> None:
    stages = (Stage((0,), blocks=3, recompute=2), Stage((1,), blocks=1))
    plan = Plan((Pipeline(stages),))
    assert Plan.from_json(plan.to_json()) == plan
    first, second = plan.to_json()["pipelines"][0]["stages"]
    assert first == {"devices": [0], "blocks": 3, "recompute": 2}
    assert second == {"devices": [1], "blocks": 1}, "nothing is recomputed unless it is said"
    assert plan.summary() == "1 row: [0]x3 recompute 2 > [1]x1"
    assert "3, recompute 2" in str(plan)
    kept = Plan((Pipeline((replace(stages[0], recompute=0), stages[1])),))
    assert kept != plan
    assert diff(kept, plan) == "  pipelines[0]: 1 row: [0]x3 > [1]x1 -> 1 row: [0]x3 recompute 2 > [1]x1"


def test_a_stage_recomputes_some_ops_of_its_blocks() -> None:
    plan = Plan((Pipeline((Stage((0,), blocks=3, recompute=2, recompute_ops="pointwise"),)),))
    (written,) = plan.to_json()["pipelines"][0]["stages"]
    assert written == {"devices": [0], "blocks": 3, "recompute": 2, "recompute_ops": "pointwise"}
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.summary() == "1 row: [0]x3 recompute 2 pointwise"
    assert "3, recompute 2 pointwise" in str(plan)


def test_only_blocks_that_a_stage_gets_are_recomputed() -> None:
    plan = Plan((Pipeline((Stage((0,)), Stage((1,), recompute=2))),))
    plan.check(num_blocks=4, world_size=2)
    assert plan.with_blocks(5).summary() == "1 row: [0]x3 > [1]x2 recompute 2"
    for blocks, held in ((3, 1), (0, 0)):
        message = rf"plan, pipelines\[0\]: stage on devices \[1\] recomputes 2 blocks, but holds {held}\nhint: .*most"
        with pytest.raises(PlanError, match=message):
            plan.check(num_blocks=blocks, world_size=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline": []}, r"plan: unknown key 'pipeline' \(did you mean 'pipelines'\?\)"),
        ({"zzz": 1}, r"unknown key 'zzz' \(known: attention, chunks, format, homes, max_length, name, "),
        (
            {"format": "hetu_fx.plan/2"},
            r"format is 'hetu_fx.plan/2', but this version reads 'hetu_fx.plan/1'",
        ),
        ({"format": 1}, r"'format' must be a string, not a number: 1"),
        ({"schedule": "1fb"}, r"unknown schedule '1fb' \(did you mean '1f1b'\?\)"),
        ({"zero": 4}, r"zero is 4\nhint: give 0"),
        ({"zero": True}, r"'zero' must be a whole number, not a boolean: true"),
        ({"max_length": 0}, r"max_length is 0\nhint: give 1 or more"),
        ({"split": {"*.weight": -1}}, r"split is .*\nhint: give a dim from 0 for each pattern of parameter names"),
        ({"sequence_parallel": 1}, r"'sequence_parallel' must be true or false, not a number: 1"),
        ({"pipelines": {}}, r"'pipelines' must be a list, not an object"),
        ({"pipelines": []}, r"a plan has no pipelines\nhint: give at least one"),
        ({"pipelines": [3]}, r"plan: pipelines\[0\] must be an object, not a number: 3"),
        ({"home": {}}, r"'home' is not supported\nhint: leave it out"),
        ({"predicted": {"seconds": "1"}}, r"plan: predicted: 'seconds' must be a number, not a string"),
    ],
)
def test_a_bad_plan_object_is_refused_with_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        of_file(DESIGN_FILE, **changes)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"stages": []}, r"plan: pipelines\[0\]: a pipeline has no stages"),
        ({"stages": [{"devices": [0]}], "rows": 0}, r"\[0\] has rows 0\nhint: give 1 or more"),
        ({"stages": [{"devices": [0]}], "rows": 1, "share": 2}, r"'rows' and 'share' are two names of one thing"),
        ({"stages": [{"devices": [0]}], "rows": -1.5}, r"'rows' must be a whole number, not a number: -1.5"),
        ({"stages": [{"devices": [0]}], "micro_batches": 0}, r"0 micro-batches\nhint: give 1 or more"),
        ({"stages": [{"devices": [0]}], "microbatches": 2}, r"did you mean 'micro_batches'"),
        (
            {"stages": [{"devices": [0], "blocks": 1}, {"devices": [1]}]},
            r"blocks for some stages only: \[1, None\]",
        ),
        (
            {"stages": [{"devices": [i], "blocks": b} for i, b in enumerate([1, 0, 3])]},
            r"in the middle: \[1, 0, 3\]",
        ),
        ({"stages": [{"devices": [0]}, {"devices": [0]}]}, r"a plan uses devices \[0\] twice"),
        ({}, r"plan: pipelines\[0\]: 'stages' is missing"),
    ],
)
def test_a_bad_pipeline_is_refused(pipeline: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        of_file(DESIGN_FILE, pipelines=[pipeline])


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"devices": []}, r"plan: pipelines\[0\].stages\[0\]: a stage has no devices"),
        ({"devices": [0, 0]}, r"uses devices \[0\] twice"),
        ({"devices": [-1]}, r"device -1 in \[-1\]"),
        ({"devices": [0.5]}, r"'devices' must be a list of whole numbers"),
        ({"devices": [0, 1], "ratios": [2]}, r"has 1 ratios \[2\]\nhint: give one per device"),
        ({"devices": [0, 1], "ratios": [1, -1]}, r"ratios \[1, -1\], but each must be at least 1"),
        ({"devices": [0, 1], "ratios": [1, 0]}, r"leave devices that hold nothing out"),
        ({"devices": [0], "blocks": -2}, r"has -2 blocks\nhint: give 0 or more"),
        ({"devices": [0], "recompute": True}, r"'recompute' must be a whole number, not a boolean: true"),
        ({"devices": [0], "recompute": 1, "recompute_ops": "pointwize"}, r"has recompute_ops 'pointwize'.*'pointwise'"),
        ({"devices": [0], "recompute_ops": "attention"}, r"has recompute_ops 'attention', but recomputes no block"),
        ({"devices": [0], "recompute": -1}, r"has recompute -1\nhint: give 0 or more"),
        (
            {"devices": [0], "blocks": 3, "recompute": 4},
            r"recomputes 4 blocks, but holds 3\nhint: give a recompute",
        ),
        ({"device": [0]}, r"unknown key 'device' \(did you mean 'devices'\?\)"),
    ],
)
def test_a_bad_stage_is_refused(stage: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        of_file(DESIGN_FILE, pipelines=[{"stages": [stage]}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"plan.json is not valid JSON: .* line 1"),
        ('{"zero": 1, "zero": 0}', "key 'zero' stands twice in one object"),
        ('{"zero": NaN}', "NaN is not a JSON number"),
        ("[]", r"plan.json must be an object, not a list"),
    ],
)
def test_a_torn_file_is_refused(tmp_path: Any, text: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        Plan.read(tmp_path / "plan.json")


def test_a_missing_file_is_a_plan_error(tmp_path: Any) -> None:
    with pytest.raises(PlanError, match=r"cannot read .*gone.json: No such file"):
        Plan.read(tmp_path / "gone.json")


def test_check_accepts_a_plan_that_fits_and_leaves_devices_idle() -> None:
    design_plan().check(num_blocks=4, world_size=5)
    Plan.tensor_parallel([0, 1]).check(num_blocks=0, world_size=2)


@pytest.mark.parametrize(
    ("num_blocks", "world_size", "message"),
    [
        (
            5,
            4,
            r"plan, pipelines\[0\]: blocks \[3, 1\] of .* add up to 4, but the model has 5 repeated blocks",
        ),
        (4, 3, r"for another world: it uses devices \[3\], but there are only 3 \(0 to 2\)"),
    ],
)
def test_check_refuses_another_model_or_world(num_blocks: int, world_size: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        design_plan().check(num_blocks=num_blocks, world_size=world_size)


def test_left_out_blocks_are_as_even_as_possible() -> None:
    pipeline = Pipeline(tuple(Stage((i,)) for i in range(3)))
    assert pipeline.blocks(8) == (3, 3, 2)
    assert Plan((pipeline,)).with_blocks(8).summary() == "1 row: [0]x3 > [1]x3 > [2]x2"
    with pytest.raises(PlanError, match="3 stages, but the model has only 2 repeated blocks\nhint: use fewer stages"):
        pipeline.blocks(2)


def test_place_finds_the_stage_of_a_device_or_none() -> None:
    plan = design_plan()
    assert [plan.place(device) for device in range(5)] == [(0, 0), (0, 0), (0, 1), (1, 0), None]


def test_str_is_a_table() -> None:
    expected = """
plan 'long': schedule 1f1b, zero 1, sequence length any
pipeline  rows  micro-batches  stage  devices  ratios  blocks
0         3     2              0      0,1      2:1     3
                               1      2        1       1
1         1     1              0      3        1       4
"""
    assert str(replace(design_plan(), name="long")) == expected.strip()


def test_explain_says_why_or_that_nobody_predicted() -> None:
    plan = replace(Plan.single(), predicted=Prediction(0.25, (), "bound by device 0", "1 row: [1]", 0.5))
    lines = plan.explain().splitlines()
    assert lines[0] == "device 0 computes each batch in 250 ms (predicted)"
    assert lines[-4] == "predicted step: 250 ms"
    assert lines[-3:-1] == ["bound by device 0", "runner-up: 1 row: [1] (500 ms, +100.0 %)"]
    assert lines[-1] == "plan: schedule 1f1b, zero 1, sequence length any"
    assert "no prediction" in Plan.single().explain()


def test_seven_rows_in_shares_five_to_two_and_three_to_one() -> None:
    assert pipeline_rows(7, Plan.data_parallel([0, 1], [5, 2])) == (5, 2)
    assert pipeline_rows(7, Plan.data_parallel([0, 1], [3, 1])) == (5, 2)
    assert pipeline_rows(1, Plan.data_parallel([0, 1], [1, 1])) == (1, 0)
    assert split_rows(7, design_plan()) == ((3, 2), (2,))


@given(st.integers(0, 500), st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_rows_add_up_and_stay_within_one_of_their_share(total: int, shares: list[int]) -> None:
    rows = pipeline_rows(total, Plan.data_parallel(range(len(shares)), shares))
    assert sum(rows) == total
    assert all(abs(r - total * s / sum(shares)) < 1 for r, s in zip(rows, shares, strict=True))


@given(st.integers(0, 100), st.integers(1, 12))
def test_micro_batches_add_up_and_differ_by_at_most_one(rows: int, count: int) -> None:
    parts = micro_batch_rows(rows, count)
    assert (len(parts), sum(parts)) == (count, rows)
    assert max(parts) - min(parts) <= 1


def test_plans_and_clusters_import_without_torch() -> None:
    code = "import sys, hetu_fx.plans.plan, hetu_fx.cluster.cluster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_pipeline_may_take_short_sequences_only() -> None:
    pipelines = Plan.data_parallel([0, 1]).pipelines
    plan = Plan((pipelines[0], replace(pipelines[1], max_length=512)), max_length=4096)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.summary() == "1 row: [0] | 1 row, up to 512 tokens: [1]"
    assert "1, up to 512 tokens" in str(plan)
    with pytest.raises(PlanError, match="max_length is 4096, but its pipelines take sequences of up to 512"):
        Plan((replace(pipelines[0], max_length=256), plan.pipelines[1]), max_length=4096)
    with pytest.raises(PlanError, match="has max_length 0\nhint: give 1 or more"):
        replace(pipelines[0], max_length=0)


TWO_STAGES = Plan((Pipeline((Stage((0, 1), blocks=5), Stage((2,), blocks=3)), micro_batches=4),))


def interleaved(chunks: int = 2, **changes: Any) -> Plan:
    return replace(TWO_STAGES, schedule="interleaved", chunks=chunks, **changes)


def test_a_plan_with_chunks_reads_and_writes_and_tells_them() -> None:
    text = DESIGN_FILE.replace("1f1b", "interleaved")
    assert of_file(text).chunks == 2
    assert of_file(text, chunks=3).to_json()["chunks"] == 3
    assert "chunks" not in design_plan().to_json()
    assert "schedule interleaved in 3 chunks" in str(interleaved(3))
    assert "schedule: 1f1b -> interleaved in 2 chunks" in diff(TWO_STAGES, interleaved())
    bubble = DESIGN_FILE.replace("1f1b", "zero-bubble")
    assert of_file(bubble).chunks == 1
    assert of_file(bubble, chunks=2).to_json()["chunks"] == 2
    assert "schedule zero-bubble in 2 chunks" in str(replace(interleaved(), schedule="zero-bubble"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"chunks": 2},
            "chunks 2 and schedule '1f1b'\nhint: give 2 or more chunks under 'interleaved', any number under",
        ),
        ({"schedule": "interleaved", "chunks": 1}, "chunks 1 and schedule 'interleaved'"),
        ({"schedule": "interleaved", "chunks": -2}, "chunks -2"),
        ({"schedule": "zero-bubble", "chunks": -1}, "chunks -1"),
    ],
)
def test_chunks_go_with_their_schedule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        of_file(DESIGN_FILE, **changes)


def test_a_stage_of_fewer_blocks_than_chunks_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"pipelines\[0\]: .* has \[5, 3\] blocks, fewer than 4 chunks per stage\nhint: use few"
    ):
        interleaved(4).check(num_blocks=8, world_size=3)


def test_a_number_of_devices_stands_for_the_first_ranks() -> None:
    assert Plan.data_parallel(2, [3, 1]) == Plan.data_parallel([0, 1], [3, 1])
    assert Plan.tensor_parallel(3) == Plan.tensor_parallel([0, 1, 2])
    assert Plan.context_parallel(2) == Plan.context_parallel([0, 1])
    with pytest.raises(PlanError, match="a plan for 0 devices"):
        Plan.data_parallel(0)


def test_plans_by_a_word_use_all_ranks() -> None:
    assert plan_in_word("data", 3) == Plan.data_parallel(3)
    assert plan_in_word("tensor", 3) == Plan.tensor_parallel(3)
    assert plan_in_word("pipeline", 2, 5).summary() == "1 row in 4: [0] > [1]"
    assert {plan_in_word(word, 1) for word in ("data", "tensor", "pipeline")} == {Plan.single()}
    with pytest.raises(PlanError, match=r"a stage on each of 3 ranks, but the model has 2 blocks\nhint: use 'data'"):
        plan_in_word("pipeline", 3, 2)


def test_data_parallel_plans_are_those_whose_replicas_are_one_device_on_all_their_rows() -> None:
    assert Plan.single().is_data_parallel
    assert Plan.data_parallel(2, [3, 1]).is_data_parallel
    assert not Plan.tensor_parallel(2).is_data_parallel
    assert not plan_in_word("pipeline", 2).is_data_parallel
    assert not Plan((Pipeline((Stage((0,)),), micro_batches=2),)).is_data_parallel
