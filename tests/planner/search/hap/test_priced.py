"""What plans run, read off the deduced graph as programs, against moves and seconds worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetu_fx.errors import PlanError
from hetu_fx.planner.count.graph_problem import GraphProblem
from hetu_fx.planner.search.hap.prices import Collectives
from hetu_fx.planner.search.hap.tensor_states import ChangeKind
from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.oracles.hap_programs import layouts
from tests.planner.search.hap.graphs import TWO_TO_ONE, convolutions, graph_problem, perceptron, run_of_plan

ROWS, GROUP = Plan.data_parallel((0, 1), (2, 1)), Plan.tensor_parallel((0, 1), (2, 1))


@pytest.mark.parametrize("problem", [perceptron(), convolutions()], ids=["perceptron", "convolutions"])
def test_rows_for_each_device_take_their_share_of_the_work_and_a_sum_of_each_parameters_gradient(
    problem: GraphProblem,
) -> None:
    run = run_of_plan(problem, ROWS, TWO_TO_ONE)
    parameters = [tensor for tensor in problem.program.tensors if tensor.kind == "parameter"]
    assert sorted(map(str, run.transfers)) == sorted(f"all-reduce of {each.name} (gradient)" for each in parameters)
    ops, program = problem.program.ops, problem.program
    work = sum(program.all_flops(op) for op in ops if op.makes[0] not in program.outputs) * (2 / 3) / 2e10
    last = sum(program.all_flops(op) for op in ops if op.makes[0] in program.outputs) / 1e10
    sums = sum(Collectives.of_cluster(TWO_TO_ONE).all_reduce(each.bytes) for each in parameters)
    assert run.seconds == pytest.approx(work + last + sums, rel=1e-3)


def test_a_group_sums_what_follows_a_product_of_parts_and_the_gradient_of_what_enters_one() -> None:
    plan = Plan((Pipeline((Stage((0, 1), (2, 1)),)),), split=(("second.weight", 0),))
    run = run_of_plan(perceptron(), plan, TWO_TO_ONE)
    kinds = [str(transfer) for transfer in run.transfers]
    assert "all-reduce of linear_2" in kinds
    assert "all-reduce of relu (gradient)" in kinds
    assert {step.form.cut for step in run.program.steps if "second.weight" in step.op.reads} == {"#2"}
    assert run.ratios == ((2 / 3, 1 / 3),)
    assert layouts(run)["second.weight"].dim == 0


def test_what_is_moved_is_what_deduction_says_is_exchanged() -> None:
    for problem in (perceptron(), convolutions()):
        run = run_of_plan(problem, GROUP, TWO_TO_ONE)
        moved = {transfer.tensor for transfer in run.transfers}
        changed = {change.tensor for step in run.program.steps for change in step.changes if change.transfers}
        assert moved == changed != set()


def test_each_device_holds_its_share_of_what_is_split_and_all_of_what_is_not() -> None:
    alone, group = (run_of_plan(perceptron(), plan, TWO_TO_ONE).held for plan in (Plan.single(0), GROUP))
    shares = ((2 / 3, 1 / 3),)
    assert group.on_device(1, shares) < group.on_device(0, shares) < alone.on_device(0, ((1.0,),))


def test_regions_with_ratios_of_their_own_take_their_share_and_the_move_from_one_to_another() -> None:
    def stage(*own: int) -> Plan:
        regions = (OpRegion("second:*", "rows", own), OpRegion("*", "rows"))
        return Plan((Pipeline((Stage((0, 1), (2, 1), program=regions),)),))

    alike, apart = (run_of_plan(perceptron(), plan, TWO_TO_ONE) for plan in (stage(), stage(1, 2)))
    assert alike.ratios == ((2 / 3, 1 / 3),)
    assert apart.ratios == ((2 / 3, 1 / 3), (1 / 3, 2 / 3))
    moves = [each for each in apart.transfers if each.change is ChangeKind.SHIFT]
    assert {move.follows for move in moves} == {(0, 1), (1, 0)}
    assert [each for each in apart.transfers if each not in moves] == list(alike.transfers)
    (cut,) = (step.form.cut_flops for step in apart.program.steps if "second.weight" in step.op.reads)
    work = [sum(sum(s.seconds(run.speeds, run.ratios)) for s in run.program.stages) for run in (alike, apart)]
    one, other = TWO_TO_ONE.devices
    assert work[1] - work[0] == pytest.approx(cut / 3 / other.speed - cut / 3 / one.speed)


class Turned(nn.Module):
    """A product with a weight that is turned first, at once for two of its readers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.weight.t()
        return (torch.relu(x @ turned) @ turned).pow(2).mean()


def test_a_parameter_that_is_read_through_a_view_has_its_home_too() -> None:
    problem = graph_problem(Turned, {"x": torch.randn(6, 8)})
    run = run_of_plan(problem, ROWS, TWO_TO_ONE)
    assert [name for step in run.program.steps for name, _ in step.homes] == ["weight"]


def test_a_plan_of_stages_is_no_program_of_all_devices() -> None:
    plan = Plan((Pipeline((Stage((0,)), Stage((1,)))),))
    with pytest.raises(PlanError, match=r"\[0\] > \[1\] is no program of all devices together\nhint: give rows"):
        run_of_plan(perceptron(), plan, TWO_TO_ONE)
