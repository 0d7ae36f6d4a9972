from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.captured_program import CapturedProgram, ModuleProgram, PlannedProgram
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.values.options import Choice
from hetu_fx.program.captures import Programs
from tests.planner.search.nets import convolutions
from tests.switching.eager.models import Choosy, make
from tests.transforms.plans import zoo_program


def test_rows_are_shared_out_in_proportion_to_speed() -> None:
    program = ModuleProgram(make(Choosy))
    planned = program.at(program.costs(8))
    cluster = Cluster.on_paper((8e9, 4e9, 2e9, 2e9))
    plan = planned.plan(cluster, "auto")
    assert [(p.devices, p.share) for p in plan.pipelines] == [((0,), 4), ((1,), 2), ((2,), 1), ((3,), 1)]
    slowed = planned.plan(cluster.with_rates({0: 4.0}), "slowed")
    assert slowed.pipelines[0].share < plan.pipelines[0].share
    assert plan.predicted is not None


def test_a_model_too_large_for_a_device_is_not_planned() -> None:
    program = ModuleProgram(make(Choosy))
    with pytest.raises(PlanError, match="whole model on every device"):
        program.at(program.costs(8)).plan(Cluster.on_paper((1e9, 1e9), memory_bytes=(1000, 1000)), "auto")


def planned() -> PlannedProgram:
    program = convolutions()
    return program.at(program.costs(18))


def test_a_split_that_groups_choose_anyway_costs_what_the_program_does() -> None:
    made = planned()
    chosen = [(name, dim) for name, dim in CHOICES if made.costs_of(((name, dim),)) is made.costs]
    assert chosen == [("head.0.weight", 0)]


CHOICES = (("features.3.weight", 0), ("head.0.weight", 0), ("head.2.weight", 0))


def test_another_split_cuts_other_work_and_is_worked_out_once() -> None:
    made = planned()
    other = made.costs_of((("features.3.weight", 0),))
    assert other.whole.split_flops != made.costs.whole.split_flops
    assert other.whole.flops == made.costs.whole.flops
    assert other.memory is not None
    assert made.costs_of((("features.3.weight", 0),)) is other


def test_hap_sees_the_rows_of_the_costs() -> None:
    program = convolutions()
    hap = program.at(program.costs(64, memory=False)).hap.program
    assert {tensor.shape[tensor.row_dim] for tensor in hap.tensors if tensor.row_dim is not None} == {64}


def test_a_dim_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match=r"wants dim 7 of 'head\.0\.weight' split"):
        planned().costs_of((("head.0.weight", 7),))


def test_what_a_job_gains_nothing_by_is_not_proposed() -> None:
    program = zoo_program("llama")
    made = PlannedProgram(program, program_costs(program, rows=32))
    cluster, choice = Cluster.on_paper([1e9, 1e9]), Choice.of(forbid=("data_parallel", "tensor_parallel", "context"))
    assert made.plan(cluster, "auto", choice=choice).schedule == "zero-bubble"
    compiled = replace(made, forbidden=("zero_bubble",))
    assert compiled.plan(cluster, "auto", choice=choice).schedule == "1f1b"  # of a block each, so not in chunks


class Halves(nn.Module):
    """Compares both halves of the batch, whose size its graph fixes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        half = int(x.shape[0]) // 2
        made = self.layers(x)
        return nn.functional.mse_loss(made[:half], made[half:])


def test_replicas_that_would_each_compute_all_of_a_fixed_batch_are_not_proposed() -> None:
    made = CapturedProgram.of(Programs(Halves(), None), {"x": torch.randn(4096, 64)})
    assert made.program.graph.fixed_rows is not None
    cluster = Cluster.on_paper([1e8, 1e8], intra=Link(1e6, 1e-6))
    assert len(made.at(made.costs()).plan(cluster, "auto").pipelines) == 1
