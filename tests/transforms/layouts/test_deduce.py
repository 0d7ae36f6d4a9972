"""What is refused before anything runs, with the op and the user's line; where parameters and gradients lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial, Split
from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from tests.model_zoo import SAMPLES, ConvNet
from tests.transforms.plans import deduced, pipeline, program_of, zoo_program


class Centered(nn.Module):
    """Takes the mean over the rows away, in the middle of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return F.relu(y - y.mean(0)).sum()


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sort(0).values.sum()


class Counting(nn.Module):
    """Keeps the sum of all rows in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return self.layer(x).sum()


MICRO_BATCHES = Plan((pipeline((0,), micro_batches=2),))


@pytest.fixture(scope="module")
def llama() -> Program:
    return zoo_program("llama")


def gradient_of(program: Program, plan: Plan, name: str) -> tuple[Annotation, Annotation]:
    made = deduced(program, plan)
    return made.parameter_annotations(next(leaf for leaf in made.parameters() if leaf.name == name))


def test_a_sum_over_the_batch_is_refused_under_micro_batches_with_its_line() -> None:
    program = program_of(Centered(), (torch.randn(4, 6),))
    with pytest.raises(
        PlanError, match=r"\(test_deduce\.py:\d+\) needs the rows of the whole batch.*\nhint: .*one stage and one"
    ):
        deduced(program, MICRO_BATCHES)


def test_replicas_may_sum_over_the_batch_in_the_middle_of_the_model() -> None:
    program = program_of(Centered(), (torch.randn(4, 6),))
    assert deduced(program, Plan.data_parallel((0, 1))).talks_across_replicas


def test_batch_norm_is_refused_under_stages_with_micro_batches() -> None:
    program = program_of(ConvNet(), SAMPLES["conv"].batch(4, 0))
    with pytest.raises(PlanError, match=r"model_zoo\.py:\d+\) needs the rows of the whole batch"):
        deduced(program, Plan((pipeline((0,), (1,), micro_batches=2),)))


def test_an_op_without_row_rule_gets_all_rows_of_several_pipelines_but_not_of_micro_batches() -> None:
    program = program_of(Sorted(), (torch.randn(4, 6),))
    assert deduced(program, Plan.data_parallel((0, 1))).talks_across_replicas
    with pytest.raises(PlanError, match=r"sort.* \(test_deduce\.py:\d+\) needs the rows of the whole batch"):
        deduced(program, MICRO_BATCHES)


def test_it_runs_on_one_device_all_the_same() -> None:
    program = program_of(Sorted(), (torch.randn(4, 6),))
    assert not deduced(program, Plan.single()).talks_across_replicas


def test_a_column_split_parameter_and_its_gradient_lie_alike(llama: Program) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    compute, gradient = gradient_of(llama, Plan.tensor_parallel((0, 1), (2, 1)), name)
    assert compute == gradient == Annotation.on((0, 1), Split(0, (75, 37)))


def test_replicas_have_summands_of_a_gradient(llama: Program) -> None:
    compute, gradient = gradient_of(llama, Plan.data_parallel((0, 1)), "lm_head.weight")
    assert (compute.top, gradient.top) == (Duplicate(2), Partial(2))


def test_a_norm_between_row_and_column_splits_has_a_whole_gradient(llama: Program) -> None:
    name = "model.layers.0.input_layernorm.weight"
    compute, gradient = gradient_of(llama, Plan.tensor_parallel((0, 1)), name)
    assert compute == gradient == Annotation.on((0, 1), Duplicate(2))


def test_unequal_replicas_are_one_group_each(llama: Program) -> None:
    plan = Plan((pipeline((0, 1), ratios=(2, 1)), pipeline((2,))))
    compute, _ = gradient_of(llama, plan, "model.layers.1.mlp.down_proj.weight")
    assert [group.ranks for group in compute.groups] == [(0, 1), (2,)]
    assert compute.shardings[0].axes == (Split(1, (75, 37)),)
    assert compute.shardings[1].axes == ()


def test_a_parameter_is_read_by_its_stage_alone(llama: Program) -> None:
    made = deduced(llama, Plan((pipeline((0,), (1,)),)))
    readers = {leaf.name: [layout.index for layout in made.readers(leaf)] for leaf in made.parameters()}
    assert readers["model.embed_tokens.weight"] == [0]
    assert readers["lm_head.weight"] == [1]


def test_a_buffer_that_sums_over_rows_is_refused_under_micro_batches() -> None:
    program = program_of(Counting(), (torch.randn(4, 6),))
    assert deduced(program, Plan.data_parallel((0, 1))).talks_across_replicas
    with pytest.raises(PlanError, match=r"test_deduce\.py:\d+\) needs the rows of the whole batch"):
        deduced(program, MICRO_BATCHES)
