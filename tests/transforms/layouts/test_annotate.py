"""Which classes are split, how large the parts are, and which plans a graph cannot take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetu_fx.deduction.factors.factors import FactorClass, FactorMap
from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.annotate import Annotate, part_sizes, tensor_classes
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph
from tests.transforms.plans import pipeline, program_of, zoo_program


@pytest.fixture(scope="module")
def llama() -> Program:
    return zoo_program("llama")


class WithLoss(nn.Module):
    """The cross entropy of a net."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(x), target)


def annotated(program: Program, plan: Plan) -> AnnotatedGraph:
    return Annotate(plan)(program.analysed)


def places(program: Program, classes: frozenset[FactorClass]) -> set[tuple[str, int]]:
    found = {place for cls in classes for place in program.factors.occurrences(cls)}
    return {(name.removeprefix("model.layers."), dim) for name, dim in found}


def test_a_transformer_is_split_as_megatron_does(llama: Program) -> None:
    classes = tensor_classes(llama.graph, llama.factors, llama.flow)
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    expected = {(f"{i}.{name}.weight", 0) for i in (0, 1) for name in columns}
    expected |= {(f"{i}.{name}.weight", 1) for i in (0, 1) for name in rows}
    assert places(llama, classes) == expected | {("model.embed_tokens.weight", 0), ("lm_head.weight", 0)}


def test_a_sequence_of_fixed_length_is_not_split_for_weights_that_would_stay_whole() -> None:
    vit = zoo_program("vit")  # the positions that are learned have the sequence's dim
    classes = tensor_classes(vit.graph, vit.factors, vit.flow)
    dims = {name: dim for name, dim in places(vit, classes) if "attention" in name and name.endswith("weight")}
    assert set(dims.values()) == {0, 1}
    assert not any("position" in name for name, _ in places(vit, classes))


def test_heads_are_cut_whole_and_the_feed_forward_by_single_columns(llama: Program) -> None:
    layout = annotated(llama, Plan.tensor_parallel((0, 1), (2, 1))).layouts[0]
    assert sorted(layout.tensor.sizes.values()) == [(2, 1), (2, 1), (65, 32), (65, 32), (75, 37), (75, 37)]


def test_a_stage_of_one_device_splits_nothing(llama: Program) -> None:
    layouts = annotated(llama, Plan((pipeline((0, 1), (2,)),))).layouts
    assert [len(layout.tensor.sizes) for layout in layouts] == [6, 0]


@pytest.mark.parametrize(
    ("size", "ratios", "parts"),
    [
        (112, (2, 1), (75, 37)),
        (3, (2, 1), (2, 1)),
        (3, (100, 1, 1), (1, 1, 1)),
        (10, (1, 1, 1), (4, 3, 3)),
        (7, (99, 1), (6, 1)),
    ],
)
def test_parts_follow_the_ratios_and_none_is_empty(size: int, ratios: tuple[int, ...], parts: tuple[int, ...]) -> None:
    nowhere = FactorMap((), frozenset(), frozenset(), frozenset(), (), {}, {})
    assert part_sizes(FactorClass(0, size, is_batch=False), ratios, nowhere) == parts


def test_more_devices_than_heads_are_refused_unless_they_are_a_multiple(llama: Program) -> None:
    with pytest.raises(
        PlanError, match=r"3 parts over 4 devices .*\nhint: give a multiple of 3 devices.*or at most 3 d"
    ):
        annotated(llama, Plan.tensor_parallel((0, 1, 2, 3)))


def test_fewer_labels_than_devices_stay_whole() -> None:
    def sizes(labels: int) -> set[int | None]:
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, labels))
        batch = (torch.randn(4, 6), torch.randint(0, labels, (4,)))
        program = program_of(WithLoss(model), batch)
        return {c.size for c in annotated(program, Plan.tensor_parallel(range(8))).classes}

    assert (sizes(9), sizes(7)) == ({12, 9}, {12})


def test_a_batch_without_rows_is_not_spread_over_pipelines() -> None:
    class Scaled(nn.Linear):
        def forward(self, scale: torch.Tensor) -> torch.Tensor:
            return (self.weight * scale).mean()

    program = program_of(Scaled(6, 5), (torch.tensor(2.0),))
    annotated(program, Plan.single())
    with pytest.raises(PlanError, match=r"batch size is fixed in its graph .*\n.* one pipeline and one micro-batch"):
        annotated(program, Plan.data_parallel((0, 1)))


def test_rows_are_spread_by_pipelines_or_by_micro_batches(llama: Program) -> None:
    assert annotated(llama, Plan.data_parallel((0, 1))).runs_in_step
    several = annotated(llama, Plan((pipeline((0,), micro_batches=2),)))
    assert several.splits_batch
    assert not several.runs_in_step
    assert not annotated(llama, Plan.tensor_parallel((0, 1))).splits_batch
