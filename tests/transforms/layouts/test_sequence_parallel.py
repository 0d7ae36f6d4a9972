"""A tensor-parallel group that shares the sequence: what it talks, and that it computes the model for any length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.states import WHOLE, SplitOn
from tests.oracles.traffic import Traffic, traffic_by_block
from tests.transforms.cases import LENGTH, Case
from tests.transforms.plans import (
    deduced,
    device_graph,
    feeder,
    pipeline,
    program_of,
    run_in_lockstep,
    same_in_group,
    talk,
)

pytestmark = pytest.mark.usefixtures("losses_in_double")

EVEN = replace(Plan.tensor_parallel((0, 1)), sequence_parallel=True)
BLOCK = "forward 2 all_gather, 2 reduce_scatter; backward 2 all_gather, 2 reduce_scatter"

# (ratios, length): lengths that do not divide, shares of nothing, fewer positions than devices.
CUTS = [((1, 1), 7), ((2, 1), 11), ((1, 9), 5), ((1, 1, 1), 2), ((5, 1, 2), 7)]

LLAMA_LAYER = """\
all_gather [0, 1] 1 [floordiv, sub] 1 1 partial: mul.Tensor({0}.input_layernorm) -> \
linear({0}.self_attn.q_proj), linear({0}.self_attn.k_proj), linear({0}.self_attn.v_proj)
reduce_scatter [0, 1] 1 [floordiv, sub] 1 1: linear({0}.self_attn.o_proj) -> add.Tensor
all_gather [0, 1] 1 [floordiv, sub] 1 1 partial: mul.Tensor({0}.post_attention_layernorm) -> \
linear({0}.mlp.gate_proj), linear({0}.mlp.up_proj)
reduce_scatter [0, 1] 1 [floordiv, sub] 1 1: linear({0}.mlp.down_proj) -> add.Tensor"""


class Table(nn.Module):
    """Adds a table with a row for each position, and multiplies by how long the sequence is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x + self.down(torch.relu(self.up(x))))
        z = y.reshape(y.shape[0], y.shape[1], 4, -1) * y.shape[1]
        return (self.down(torch.relu(self.up(self.norm(z.flatten(2))))) ** 2).sum()


class MeanOfRows(nn.Module):
    """Takes a mean over the sequence before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x + self.down(torch.relu(self.up(x))))
        return (self.norm(y.mean(1)) ** 2).sum() + self.norm(y.cumsum(1)).sum()


class CausalDropout(nn.Module):
    """Attention without heads, whose mask is made of sizes read of projections that are cut along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 64), nn.Linear(64, 8), nn.LayerNorm(8)
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        y = self.norm(x)
        attended = nn.functional.scaled_dot_product_attention(self.query(y), y, y, is_causal=True, dropout_p=0.3)
        return ((x + self.out(attended)) ** 2).sum()


def shared(ratios: tuple[int, ...]) -> Plan:
    return replace(Plan.tensor_parallel(tuple(range(len(ratios))), ratios), sequence_parallel=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_scatters_its_sums_and_gathers_for_all_projections_at_once(llama: Case, rank: int) -> None:
    layers = [LLAMA_LAYER.format(f"model.layers.{layer}") for layer in (0, 1)]
    lines = talk(device_graph(llama.program, EVEN, rank))
    assert "\n".join(lines[1:9]) == "\n".join(layers)
    assert not any(line.startswith(("all_reduce", "identity")) for line in lines[:10])


def test_forward_and_backward_of_a_block_scatter_and_gather_twice(llama: Case, gpt2: Case) -> None:
    assert str(blocks_of(llama.program)[1]) == BLOCK
    assert [str(blocks_of(gpt2.program)[block]) for block in (0, 1)] == [BLOCK, BLOCK]


def test_each_sum_in_parts_is_one_gather_in_the_backward(llama: Case) -> None:
    """The first block's backward has one more: it reads what the table's sum left in parts."""
    found = blocks_of(llama.program)
    scattered = sum(traffic.forward.get("reduce_scatter", 0) for traffic in found.values())
    gathered = sum(traffic.backward.get("all_gather", 0) for traffic in found.values())
    assert scattered == gathered == 2 + 2 + 1


def blocks_of(program: Program) -> Mapping[int | None, Traffic]:
    return traffic_by_block(device_graph(program, EVEN, 0), program.graph.block_paths)


def test_gradients_of_norms_are_summands_that_nothing_sums_in_the_graph(llama: Case) -> None:
    made = deduced(llama.program, EVEN)
    norms = [leaf for leaf in made.parameters() if "norm" in leaf.name]
    assert len(norms) == 5
    assert all(leaf.node in made.tensor_split.summed_cotangents for leaf in norms)
    assert all(made.parameter_annotations(leaf)[1].has_partial for leaf in norms)


@pytest.mark.parametrize(("ratios", "length"), CUTS)
def test_loss_and_gradients_of_llama_are_those_of_one_device(llama: Case, ratios: tuple[int, ...], length: int) -> None:
    llama.same_as_alone(shared(ratios), length)


@pytest.mark.parametrize(("ratios", "length"), CUTS)
def test_loss_and_gradients_with_dropout_are_those_of_one_device(
    gpt2: Case, ratios: tuple[int, ...], length: int
) -> None:
    gpt2.same_as_alone(shared(ratios), length)


@pytest.mark.parametrize("ratios", [(1, 1), (2, 1), (1, 40), (5, 1, 2)])
def test_a_sequence_of_fixed_length_is_cut_in_numbers(vit: Case, ratios: tuple[int, ...]) -> None:
    assert "[8, 9]" in talk(device_graph(vit.program, EVEN, 0))[0]
    vit.same_as_alone(shared(ratios), LENGTH)


@pytest.mark.parametrize("ratios", [(1, 1), (1, 9)])
@pytest.mark.parametrize("module", [Table, MeanOfRows, CausalDropout])
def test_what_needs_the_length_or_the_whole_sequence_gets_it(module: type[nn.Module], ratios: tuple[int, ...]) -> None:
    model, x = module().double(), torch.randn(3, 7, 8, dtype=torch.float64)
    program = program_of(model, (x,))
    for length in (7, 4):
        batch = {"0": torch.randn(3, length, 8, dtype=torch.float64)}
        devices = same_in_group(program, model, shared(ratios), batch, limit=1e-10)
        assert any(line.startswith("reduce_scatter") for line in talk(devices[0]))


@pytest.mark.parametrize("length", [7, 2])
def test_an_output_is_put_together(length: int) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.LayerNorm(8))
    program, plan = program_of(model, (torch.randn(3, 5, 8),)), shared((1, 2, 3))
    devices = {rank: device_graph(program, plan, rank, wants_values=True) for rank in plan.devices}
    x = torch.randn(3, length, 8)
    results = run_in_lockstep(devices, feeder(program, plan, model, {"0": x}))
    for rank in plan.devices:
        torch.testing.assert_close(results[rank]["value", "output"], model(x))


def test_a_size_of_what_is_cut_is_that_of_the_whole() -> None:
    program = program_of(CausalDropout().train(), (torch.randn(3, 7, 8),))
    states = deduced(program, EVEN).tensor_split.states
    read = [node.args[0] for node in program.graph.graph.nodes if node.target is torch.ops.aten.sym_size.int]
    assert [type(states[source]) for source in read] == [SplitOn, SplitOn]
    device = device_graph(program, EVEN, 1)
    sizes = [node for node in device.graph.nodes if node.target is torch.ops.aten.sym_size.int]
    assert [node.args[0].op for node in sizes] == ["placeholder"]


def test_a_value_goes_to_the_next_stage_whole(llama: Case) -> None:
    plan = Plan((pipeline((0, 1), (2, 3)),), sequence_parallel=True)
    made = deduced(llama.program, plan)
    first, last = (device_graph(llama.program, plan, rank) for rank in (0, 2))
    (sent,) = first.handovers_out
    node = next(n for n in llama.program.graph.graph.nodes if n.name == sent.value.name)
    assert made.tensor_split.made[node] != WHOLE
    assert made.tensor_split.states[node] == WHOLE
    assert not sent.value.annotation.shardings[0].splits
    assert talk(first)[-1].startswith("all_reduce [0, 1] duplicate: add.Tensor")
    assert talk(last)[0].startswith("local_slice [2, 3] 1 [floordiv, sub] 1 1: ")


def test_a_stage_of_one_device_shares_nothing(llama: Case) -> None:
    assert talk(device_graph(llama.program, replace(Plan.single(), sequence_parallel=True), 0)) == []


def test_a_model_without_a_sequence_is_refused() -> None:
    program = program_of(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6)), (torch.randn(4, 6),))
    with pytest.raises(PlanError, match="apart from the rows of the batch this model has no dim"):
        deduced(program, EVEN)


def test_nothing_is_cut_along_the_sequence_unless_the_plan_asks(llama: Case) -> None:
    off = replace(EVEN, sequence_parallel=False)
    assert deduced(llama.program, off).annotated.sequence == frozenset()
    assert not any(line.startswith("reduce_scatter") for line in talk(device_graph(llama.program, off, 0)))
