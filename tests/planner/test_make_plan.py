import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cases.exhaustive_plans import all_plans
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner import make_plan as planning
from hetu_fx.planner.make_plan import (
    NEGLIGIBLE,
    PlanOptions,
    default_folder,
    make_or_find_plans,
    make_plan,
    question_key,
)
from hetu_fx.planner.price.step import memory_problems, predict
from hetu_fx.planner.search.contiguous import Builder, best_segments
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.stage_estimates import ReplicaRules
from hetu_fx.planner.searches import DEFAULT
from hetu_fx.planner.simulate.simulate import num_jobs, simulated_seconds
from hetu_fx.planner.values.options import Choice
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import FAST_LINK, paper, transformer
from tests.planner.search.nets import problem

BIG = transformer(rows=16, length=128, width=256)


SHARING = PlanOptions(sequence_parallel=True)


def test_finalists_that_take_many_jobs_leave_room_for_those_that_take_few(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Problem(Profile(BIG), paper(*[100] * 8))
    many = [Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=16 - count),)) for count in range(12)]
    few = Plan((Pipeline((Stage((2,)),), micro_batches=1),))
    found = {plan.with_blocks(BIG.num_blocks): 1e-9 * (100 + number) for number, plan in enumerate((*many, few))}
    jobs = [num_jobs(plan) + len(plan.devices) for plan in (*many[: planning.LEAST_FINALISTS], few, few)]
    monkeypatch.setattr(planning, "MOST_JOBS", sum(jobs))
    taken = planning._simulated(found, asked)
    assert few.with_blocks(BIG.num_blocks) in taken
    assert len([plan for plan in taken if plan in found]) == planning.LEAST_FINALISTS + 1


def test_the_best_pipelines_are_tried_under_schedules_of_smaller_bubbles() -> None:
    asked, small = Problem(Profile(BIG), paper(100, 100)), Problem(Profile(BIG), paper(100, 100, memory_bytes=1))
    plan = Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=4),)).with_blocks(BIG.num_blocks)
    twin, chunks = replace(plan, schedule="zero-bubble"), replace(plan, schedule="interleaved", chunks=2)
    both = replace(chunks, schedule="zero-bubble")
    taken = planning._simulated({plan: 1.0}, asked)
    assert [*taken] == [plan, twin, chunks, both]  # of BIG, whose stages have two blocks each
    assert taken[both] < min(taken[twin], taken[chunks])
    assert max(taken[twin], taken[chunks]) < taken[plan]
    forbidding = replace(asked, options=PlanOptions(forbidden=("zero_bubble", "interleaved")))
    assert [*planning._simulated({plan: 1.0}, forbidding)] == [plan]
    assert [*planning._simulated({plan: 1.0}, small)] == [plan]


@pytest.mark.parametrize(
    ("layers", "forbidden", "found"),
    [
        (2, ("zero_bubble",), "1f1b"),
        (4, ("zero_bubble",), "interleaved in 2 chunks"),
        (8, ("zero_bubble",), "interleaved in 4 chunks"),
        (2, (), "zero-bubble"),
        (4, (), "zero-bubble in 2 chunks"),
        (8, (), "zero-bubble in 4 chunks"),
        (8, ("interleaved",), "zero-bubble"),
    ],
)
def test_stages_are_in_chunks_where_they_have_blocks_for_them(
    layers: int, forbidden: tuple[str, ...], found: str
) -> None:
    alone = ("data_parallel", "tensor_parallel", "context", *forbidden)
    options = PlanOptions(micro_batches=(1, 4)).chosen(Choice.of(forbid=alone))
    made = make_plan(transformer(layers, length=512, width=512), paper(100, 100), options=options)
    assert made.schedule_text == found


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.seconds


def test_rows_follow_the_speeds_where_links_are_fast() -> None:
    plan = make_plan(BIG, paper(8, 4, 2, 2))
    assert plan.summary() == "4 rows: [0]x4 | 2 rows: [1]x4 | 1 row: [2]x4 | 1 row: [3]x4"


def test_a_hopelessly_slow_device_is_left_out_and_the_plan_says_so() -> None:
    plan = make_plan(BIG, paper(8, 8, 0.01))
    assert plan.devices == (0, 1)
    assert plan.predicted is not None
    assert plan.predicted.left_out == (2,)
    assert "left out: 1 of 3 devices, 2" in plan.explain().splitlines()


def test_a_slow_link_is_left_unused_or_crossed_by_a_pipeline() -> None:
    plan = make_plan(BIG, paper(1, 1, 1, 1, nodes="aabb", inter=Link(1e5, 1e-2)))
    assert plan.devices == (0, 1)
    crossing = make_plan(BIG, paper(1, 1, nodes="ab", inter=Link(2e6)))
    assert len(crossing.pipelines) == 1


def test_devices_that_lose_much_time_to_meet_make_no_group() -> None:
    late = Cluster.on_paper([1e9, 1e9], intra=FAST_LINK, meeting_seconds=[0.0, 1.0])
    plans = [make_plan(replace(BIG, rows=1), cluster) for cluster in (paper(1, 1), late)]
    assert [max(len(stage.devices) for stage in plan.pipelines[0].stages) for plan in plans] == [2, 1]


def test_of_devices_that_are_alike_but_for_that_those_on_time_make_the_group() -> None:
    late = Cluster.on_paper([1e9] * 4, intra=FAST_LINK, meeting_seconds=[1.0, 0.0, 1.0, 0.0])
    builder = Builder(BIG, late, ReplicaRules("1f1b", 1, (1,), dict.fromkeys(range(4), 1 << 40)), 1)
    slow, fast = (one.seconds(1, 1) for pair in ((0, 2), (1, 3)) for one in builder.build((pair,)))
    assert slow > fast + 1.0


def test_a_straggler_gets_less_after_its_rate_fell() -> None:
    plan = make_plan(BIG, paper(4, 4).with_rates({0: 3}))
    assert plan.summary() == "1 row: [0]x4 | 3 rows: [1]x4"


def test_one_device_runs_everything() -> None:
    plan = make_plan(BIG, paper(1))
    assert plan == replace(Plan.single(), pipelines=plan.pipelines)
    assert plan.summary() == "1 row: [0]x4"


def test_little_memory_makes_stages_or_shards_that_fit() -> None:
    # parameters and gradients alone are twice the parameters, states spread over four replicas 0.75 more
    cluster = paper(4, 4, 4, 4, memory_bytes=int(2.5 * BIG.whole.parameter_bytes))
    plan = make_plan(BIG, cluster)
    assert plan.predicted is not None
    assert not memory_problems(plan.predicted, cluster, 0.9)
    assert any(len(pipeline.devices) > 1 for pipeline in plan.pipelines)


def test_more_micro_batches_than_usual_are_used_where_nothing_else_fits() -> None:
    costs = transformer(rows=64, length=256, vocabulary=16)
    need = predict(Plan.single(), replace(costs, rows=1), paper(1)).devices[0].total_bytes
    plan = make_plan(costs, paper(1, memory_bytes=int(1.5 * need)))
    assert plan.pipelines[0].micro_batches > 8


def test_what_each_device_lacks_is_said_and_what_would_help() -> None:
    costs = transformer(layers=8, rows=16, length=128, width=256)
    with pytest.raises(PlanError) as told:
        make_plan(costs, paper(100, 100, memory_bytes=40_000_000))
    message = str(told.value)
    lacking = [float(one) for one in re.findall(r"device \d ([\d.]+) MB", message)]
    held = predict(_nearest(message), costs, paper(100, 100)).devices
    assert lacking == pytest.approx([one.total_bytes / 1e6 - 36 for one in held], abs=0.1)
    assert f"{sum(lacking):.1f} MB of host memory for states would do" in message
    enough = int(re.findall(r"(\d+) devices like the largest would do", message)[0])
    options = PlanOptions(pipelines=False, tensor_parallel=False, context_parallel=False)
    assert make_plan(costs, paper(*[100] * enough, memory_bytes=40_000_000), options=options).zero == 3
    with pytest.raises(PlanError):
        make_plan(costs, paper(*[100] * (enough - 1), memory_bytes=40_000_000), options=options)


def _nearest(message: str) -> Plan:
    """Return the pipeline of two stages that a message says lacks least."""
    assert "[0]x4 recompute 4 > [1]x4 recompute 4 with zero 1" in message
    return Plan((Pipeline((Stage((0,), recompute=4), Stage((1,), recompute=4)), micro_batches=16),)).with_blocks(8)


def test_what_is_forbidden_and_would_help_is_said_with_what_is_lacking_then() -> None:
    costs = transformer(layers=8, rows=16, length=128, width=256)
    options = PlanOptions(recompute=False, pipelines=False, tensor_parallel=False, context_parallel=False)
    with pytest.raises(PlanError, match=r"with recompute [\d.]+ MB would be lacking; in bf16 throughout [\d.]+ MB"):
        make_plan(costs, paper(100, 100, memory_bytes=40_000_000), options=options)


def test_nothing_fits_is_said_with_numbers() -> None:
    with pytest.raises(PlanError, match=r"no plan fits the memory of devices 0, 1: .*\nhint: use more or larger"):
        make_plan(BIG, paper(1, 1, memory_bytes=1000))


def test_options_rule_out_what_a_model_cannot_do() -> None:
    cluster = paper(1, 1, nodes="ab", inter=Link(2e6))
    only = PlanOptions(micro_batches=(1,), tensor_parallel=False, pipelines=False, name="n", max_length=8)
    plan = make_plan(BIG, cluster, options=only)
    assert all(len(p.devices) == 1 and p.micro_batches == 1 for p in plan.pipelines)
    assert (plan.name, plan.max_length) == ("n", 8)


def test_a_program_without_blocks_is_never_cut_into_stages() -> None:
    costs = ProgramCosts(8, PartCosts(flops=1e9, parameter_bytes=100), (), PartCosts())
    plan = make_plan(costs, paper(1, 1))
    assert all(len(pipeline.stages) == 1 for pipeline in plan.pipelines)
    plan.check(num_blocks=0, world_size=2)


def test_blocks_that_differ_are_cut_where_it_is_even() -> None:
    base = BIG.blocks[0]
    heavy = replace(base, flops=3 * base.flops)
    costs = replace(BIG, blocks=(heavy, base, base, base), before=PartCosts(), after=PartCosts())
    cluster = paper(1, 1)
    rules = ReplicaRules("1f1b", 1, (1,), {device.rank: device.memory_bytes for device in cluster.devices})
    (replica,) = Builder(costs, cluster, rules, micro_rows=1).build(((0,), (1,)))
    assert [stage.blocks for stage in replica.pipeline.stages] == [1, 3]


def test_the_plan_says_why_and_names_another_kind_of_plan() -> None:
    plan = make_plan(BIG, paper(8, 4, 2, 2))
    assert plan.predicted is not None
    assert plan.predicted.why.startswith("bound by device ")
    assert plan.predicted.runner_up != plan.summary()
    assert (plan.predicted.runner_up_seconds or 0) >= plan.predicted.seconds * (1 - NEGLIGIBLE)


def test_the_same_question_has_the_same_answer() -> None:
    cluster = paper(5, 3, 3, 1)
    assert make_plan(BIG, cluster).to_json() == make_plan(BIG, Cluster.from_json(cluster.to_json())).to_json()


@pytest.mark.parametrize(
    "cluster",
    [
        paper(4, 1),
        paper(3, 2, 2),
        paper(4, 2, 1),
        paper(3, 3, 1, nodes="aab", inter=Link(2e7, 1e-4)),
        paper(2, 2, nodes="ab", inter=Link(2e6)),
    ],
    ids=str,
)
def test_the_plan_is_as_fast_as_the_best_of_all(cluster: Cluster) -> None:
    costs, counts = transformer(layers=3, rows=5, units=2), (1, 4)
    best = min(simulated_seconds(plan, costs, cluster) for plan in all_plans(costs, cluster, counts))
    options = PlanOptions(micro_batches=counts)
    found = seconds(make_plan(costs, cluster, options=options))
    assert best <= found * (1 + 1e-9)
    assert found <= best * 1.02


def test_eight_devices_are_planned_and_checked() -> None:
    costs = transformer(layers=12, rows=32)
    plan = make_plan(costs, paper(8, 8, 4, 4, 4, 2, 2, 1, nodes="aaaabbbb", inter=Link(1e8, 1e-4)))
    plan.check(num_blocks=12, world_size=8)
    assert seconds(plan) < seconds(make_plan(costs, paper(8, 8)))


def test_sixteen_devices_are_planned() -> None:
    costs = transformer(layers=8, rows=64)
    plan = make_plan(costs, paper(*[8] * 8, *[2] * 8))
    plan.check(num_blocks=8, world_size=16)
    ideal = predict(Plan.single(), costs, paper(80)).seconds
    assert seconds(plan) < 1.5 * ideal


def test_segments_leave_devices_out_and_never_overlap() -> None:
    rows = {(0, 1): 5, (1, 2): 1, (2, 3): 4, (0, 2): 8, (1, 3): 6}
    assert best_segments(rows, 3, 2, 12) == [(0, 2), (2, 3)]
    assert best_segments(rows, 3, 1, 8) == [(0, 2)]
    assert best_segments(rows, 3, 3, 10) == [(0, 1), (1, 2), (2, 3)]
    assert best_segments(rows, 3, 2, 13) is None
    assert best_segments(rows, 3, 4, 1) is None


def test_the_sequence_is_shared_where_memory_asks_for_it() -> None:
    # one row alone keeps more than a device has, unless a group shares the sequence
    part = PartCosts(flops=1e6, split_flops=1e6, activation_bytes=1000, sequence_activation_bytes=1000, num_ops=1)
    costs = ProgramCosts(2, PartCosts(), (part,), PartCosts(), units=2)
    assert make_plan(costs, paper(1, 1, memory_bytes=700)).sequence_parallel
    with pytest.raises(PlanError, match="no plan fits"):
        make_plan(costs, paper(1, 1, memory_bytes=700), options=PlanOptions(sequence_parallel=False))


def test_the_sequence_is_shared_where_that_is_faster_and_not_where_it_is_as_fast() -> None:
    work = PartCosts(flops=1e9, split_flops=1e9, parameter_bytes=1e9, split_parameter_bytes=1e9, num_ops=1)
    much = replace(
        work, traffic_bytes=1e9, sequence_traffic_bytes=1e9, sequence_activation_bytes=1.0, activation_bytes=1.0
    )
    little = replace(much, traffic_bytes=1.0, sequence_traffic_bytes=1.0)
    cluster = paper(1, 1, memory_bytes=int(3e9))  # so that the parameters must be split
    programs = [ProgramCosts(1, PartCosts(), (part,), PartCosts(), units=2) for part in (much, little)]
    plans = [make_plan(program, cluster, options=SHARING) for program in programs]
    assert [plan.sequence_parallel for plan in plans] == [True, False]


PROBLEM = Problem(Profile(transformer()), paper(4, 2))


def explained(plans: tuple[Plan, ...]) -> list[str]:
    return [plan.explain() for plan in plans]


def test_the_same_question_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_or_find_plans(PROBLEM, DEFAULT, tmp_path / "new")
    monkeypatch.setattr(planning, "make_plans", lambda *question: pytest.fail("searched again"))
    again = replace(PROBLEM, cluster=Cluster.from_json(PROBLEM.cluster.to_json()), tell=print)
    assert explained(make_or_find_plans(again, DEFAULT, tmp_path / "new")) == explained(first)


def test_the_key_depends_on_all_that_the_answer_depends_on() -> None:
    others = [
        replace(PROBLEM, profile=PROBLEM.profile.with_rows(17)),
        replace(PROBLEM, cluster=paper(4, 3)),
        replace(PROBLEM, options=PlanOptions(zero=0)),
        replace(PROBLEM, before=Plan.single()),
        replace(PROBLEM, captured=problem(PROBLEM.cluster).captured),
    ]
    keys = {question_key(problem, DEFAULT) for problem in (PROBLEM, *others)} | {question_key(PROBLEM, "malleus")}
    assert len(keys) == len(others) + 2
    assert question_key(replace(PROBLEM, tell=print), DEFAULT) in keys


@pytest.mark.parametrize("spoil", ["", "{}", "other key", "no plans"])
def test_a_file_that_is_not_the_answer_is_made_anew(tmp_path: Path, spoil: str) -> None:
    first = make_or_find_plans(PROBLEM, DEFAULT, tmp_path)
    path = tmp_path / f"{question_key(PROBLEM, DEFAULT)}.json"
    good = json.loads(path.read_text())
    bad = {"other key": good | {"key": "0"}, "no plans": good | {"plans": []}}
    path.write_text(json.dumps(bad[spoil]) if spoil in bad else spoil)
    with pytest.warns(UserWarning, match="^planning again: "):
        again = make_or_find_plans(PROBLEM, DEFAULT, tmp_path)
    assert explained(again) == explained(first)
    assert json.loads(path.read_text()) == good


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="^the plan is not kept for the next time: "):
        plans = make_or_find_plans(PROBLEM, DEFAULT, tmp_path / "file" / "inside")
    assert len(plans) == 1


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_folder() == Path("/somewhere/hetu_fx/plans")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_folder() == Path("/home/me/.cache/hetu_fx/plans")
