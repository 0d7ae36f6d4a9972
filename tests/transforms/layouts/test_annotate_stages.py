"""Where a graph is cut into stages, and what belongs to none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.annotated_graph import StageNodes, cut_stages, stage_nodes
from hetu_fx.transforms.show import op_name
from tests.transforms.plans import pipeline, program_of, zoo_program


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, bias=False)
        self.second = nn.Linear(10, 18, bias=False)
        self.third = nn.Linear(18, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


@pytest.fixture(scope="module")
def llama() -> Program:
    return zoo_program("llama")


@pytest.fixture(scope="module")
def layers() -> Program:
    """Three layers of 60, 180 and 36 parameters, without repeated blocks."""
    return program_of(Layers(), (torch.randn(4, 6),))


def parameters_by_stage(program: Program, blocks: tuple[int, ...]) -> list[set[str]]:
    stages = cut_stages(program.graph, program.flow, blocks)
    leaves = {leaf.node: leaf.name for leaf in program.graph.leaves if leaf.node in program.flow.parameters}
    found: list[set[str]] = [set() for _ in blocks]
    for node, stage in stages.items():
        found[stage] |= {leaves[n] for n in node.all_input_nodes if n in leaves}
    return found


def stages_of(program: Program, *stages: tuple[int, ...]) -> list[StageNodes]:
    annotated = Annotate(Plan((pipeline(*stages),)))(program.analysed)
    return [stage_nodes(annotated, layout) for layout in annotated.layouts]


def test_what_stands_before_and_after_the_blocks_goes_to_the_outer_stages(llama: Program) -> None:
    first, last = parameters_by_stage(llama, (1, 1))
    assert "model.embed_tokens.weight" in first
    assert {"model.norm.weight", "lm_head.weight"} <= last
    assert all("layers.0" in name for name in first - {"model.embed_tokens.weight"})
    assert all("layers.1" in name for name in last - {"model.norm.weight", "lm_head.weight"})


def test_a_last_stage_without_blocks_holds_the_head(llama: Program) -> None:
    assert parameters_by_stage(llama, (2, 0))[1] == {"model.norm.weight", "lm_head.weight"}


def test_one_activation_goes_from_stage_to_stage(llama: Program) -> None:
    first, last = stages_of(llama, (0,), (1,))
    assert len(first.sent) == 1
    assert first.sent == last.received
    assert op_name(first.sent[0]) == "add.Tensor"


def test_masks_and_rotary_tables_are_computed_in_each_stage(llama: Program) -> None:
    first, last = stages_of(llama, (0,), (1,))
    shared = {op_name(node) for node in first.needed & last.needed}
    assert {"cos", "sin"} <= shared
    assert not {"linear", "scaled_dot_product_attention"} & shared


def test_the_loss_is_made_by_the_last_stage_alone(llama: Program) -> None:
    first, last = stages_of(llama, (0,), (1,))
    assert first.outputs == ()
    assert llama.graph.loss in [llama.graph.output_values[i] for i in last.outputs]


def test_without_blocks_stages_get_about_even_shares_of_the_parameters(layers: Program) -> None:
    assert parameters_by_stage(layers, (0, 0)) == [{"first.weight"}, {"second.weight", "third.weight"}]


def test_a_first_layer_with_more_than_half_of_the_parameters_is_a_stage_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(6, 30, bias=False), nn.Tanh(), nn.Linear(30, 2, bias=False))
    assert parameters_by_stage(program_of(model, (torch.randn(4, 6),)), (0, 0)) == [{"0.weight"}, {"2.weight"}]


def test_a_stage_that_would_hold_nothing_is_refused(layers: Program) -> None:
    with pytest.raises(
        PlanError, match=r"stage\(s\) \[\d(, \d)*\] of 9 would hold no operation.*\nhint: use fewer stages"
    ):
        cut_stages(layers.graph, layers.flow, (0,) * 9)


class Experts(nn.Module):
    """Layers by turns, each for the rows that a gate has chosen it for."""

    def __init__(self, *, shares_rows: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.shares_rows = shares_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, made = self.gate(x).argmax(-1), torch.zeros_like(x)
        (shared,) = torch.where(chosen == 0)
        for number, expert in enumerate(self.experts):
            (rows,) = (shared,) if self.shares_rows else torch.where(chosen == number)
            made = made.index_add(0, rows, expert(x[rows]))
        return made.pow(2).mean()


def test_values_of_a_size_that_only_values_tell_are_made_where_they_are_read() -> None:
    first, second = stages_of(program_of(Experts(shares_rows=False), {"x": torch.randn(6, 4)}), (0,), (1,))
    assert not any(map(meta.is_data_dependent, (*first.sent, *second.received)))
    assert first.sent


def test_a_value_of_such_a_size_that_two_stages_read_is_refused_by_name() -> None:
    program = program_of(Experts(shares_rows=True), {"x": torch.randn(6, 4)})
    with pytest.raises(PlanError, match=r"only the values of a batch tell \(test_annotate_stages\.py"):
        stages_of(program, (0,), (1,))
