"""Tensor parallel groups that share the sequence: what they talk among whom, and that they compute as one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import DeductionError
from hetu_fx.graph.graph import OutputKind
from hetu_fx.plans.plan import Attention, Pipeline, Plan, Stage
from hetu_fx.transforms.layouts.annotated_graph import CONTEXT, TENSOR
from hetu_fx.transforms.layouts.deduce import axis_prices
from tests.model_zoo import NO_DROPOUT, SAMPLES
from tests.transforms.cases import LENGTH, Case, batch_of
from tests.transforms.plans import (
    deduced,
    device_graph,
    feeder,
    program_of,
    run_in_lockstep,
    same_in_group,
    talk,
)

pytestmark = pytest.mark.usefixtures("losses_in_double")

# What rank 3 of 2 x 2 devices talks in a layer: gathers with its context group [1, 3], sums with its tensor group.
LLAMA_LAYER = """\
identity [2, 3]: mul.Tensor({0}.input_layernorm) -> linear({0}.self_attn.q_proj), linear({0}.self_attn.k_proj), \
linear({0}.self_attn.v_proj)
all_gather [1, 3] 1 [floordiv, sub] 1 1 partial: linear({0}.self_attn.v_proj) -> reshape
all_gather [1, 3] 2 [floordiv, sub] 1 1 partial: add.Tensor -> slice.Tensor
all_reduce [2, 3] duplicate: linear({0}.self_attn.o_proj) -> add.Tensor
identity [2, 3]: mul.Tensor({0}.post_attention_layernorm) -> linear({0}.mlp.gate_proj), linear({0}.mlp.up_proj)
all_reduce [2, 3] duplicate: linear({0}.mlp.down_proj) -> add.Tensor"""


def grid(
    context: tuple[int, ...] = (1, 1), tensor: tuple[int, ...] = (1, 1), attention: Attention = "gathered"
) -> Plan:
    devices = tuple(range(len(context) * len(tensor)))
    stage = Stage(devices, tensor, context=len(context), context_ratios=context)
    return Plan((Pipeline((stage,)),), attention=attention)


def test_a_layer_gathers_among_context_peers_and_sums_among_tensor_peers(llama: Case) -> None:
    lines = talk(device_graph(llama.program, grid(), 3))
    layers = [LLAMA_LAYER.format(f"model.layers.{layer}") for layer in (0, 1)]
    start = lines.index(layers[0].split("\n")[0])
    assert lines[start : start + 12] == "\n".join(layers).split("\n")


def test_keys_and_values_of_a_head_go_round_among_those_that_have_it(llama: Case) -> None:
    for rank, peers in ((0, "[0, 2]"), (3, "[1, 3]")):
        lines = talk(device_graph(llama.program, grid(attention="ring"), rank))
        rings = [line for line in lines if line.startswith("ring_attention")]
        assert len(rings) == 2
        assert all(f"None {peers} [floordiv, sub]" in line for line in rings)
        assert not any(line.startswith("all_gather [1, 3]") for line in lines)


def test_grouped_heads_under_gathered_attention_are_those_of_one_device(llama: Case) -> None:
    llama.same_as_alone(grid((3, 1), (2, 1)), 11)
    llama.same_as_alone(grid((1, 9)), 5)


@pytest.mark.parametrize(("context", "tensor"), [((1, 1), (1, 1)), ((3, 1), (1, 2))])
def test_two_grouped_heads_in_a_ring_are_those_of_one_device(context: tuple[int, ...], tensor: tuple[int, ...]) -> None:
    model = SAMPLES["llama"].model(num_attention_heads=4, num_key_value_heads=2).double().train()
    program = program_of(model, batch_of("llama", LENGTH))
    devices = same_in_group(program, model, grid(context, tensor, "ring"), batch_of("llama", 7), limit=1e-10)
    assert any(line.startswith("ring_attention") for line in talk(devices[3]))


def test_learned_positions_and_dropout_are_those_of_one_device(gpt2: Case) -> None:
    gpt2.same_as_alone(grid((3, 1), (2, 1)), 11)


def test_an_encoder_with_padding_is_that_of_one_device(bert: Case) -> None:
    bert.same_as_alone(grid((1, 2), (1, 1)), 7)


def test_an_encoder_without_dropout_attends_in_a_ring() -> None:
    model = SAMPLES["bert"].model(**NO_DROPOUT["bert"]).double().train()
    program = program_of(model, batch_of("bert", LENGTH))
    devices = same_in_group(program, model, grid((2, 1), (2, 1), "ring"), batch_of("bert", 8), limit=1e-10)
    assert sum(line.startswith("ring_attention") for line in talk(devices[1])) == 2


def test_a_sequence_of_fixed_length_is_cut_in_numbers(vit: Case) -> None:
    vit.same_as_alone(grid((1, 2), (2, 1)), LENGTH)


def test_recomputed_blocks_of_a_grid_are_those_of_one_device(llama: Case) -> None:
    plan = grid((2, 1), attention="ring")
    (pipeline,) = plan.pipelines
    stage = replace(pipeline.stages[0], recompute=1)
    llama.same_as_alone(replace(plan, pipelines=(replace(pipeline, stages=(stage,)),)), 7)


def test_weights_are_split_over_the_tensor_axis_and_their_gradients_are_summands_over_the_context(llama: Case) -> None:
    made = deduced(llama.program, grid((3, 1), (2, 1)))
    found = {leaf.name: tuple(map(str, made.parameter_annotations(leaf))) for leaf in made.parameters()}
    for name, split in (("k_proj", "S(0, 2:1, 1x_x8)"), ("o_proj", "S(1, 2:1, 1x_x16)")):
        assert found[f"model.layers.0.self_attn.{name}.weight"] == (f"[0-3] D(2) {split}", f"[0-3] P(2) {split}")
    assert found["model.norm.weight"] == ("[0-3] D(4)", "[0-3] P(2) D(2)")


def test_an_output_is_put_together(llama: Case) -> None:
    plan, batch = grid((1, 2), (2, 1)), batch_of("llama", 7)
    devices = {rank: device_graph(llama.program, plan, rank, wants_values=True) for rank in plan.devices}
    results = run_in_lockstep(devices, feeder(llama.program, plan, llama.model, batch))
    whole = deduced(llama.program, plan, wants_values=True)
    logits = dict((leaf.name, node) for leaf, node in llama.program.graph.outputs_of(OutputKind.VALUE))["logits"]
    lies = whole.value_annotation(logits, whole.annotated.layouts[0])
    expected = llama.model(**batch).logits
    for rank in plan.devices:
        bounds = lies.region(rank, expected.shape).boxes[0].bounds
        part = expected[tuple(slice(*pair) for pair in bounds)]
        torch.testing.assert_close(results[rank]["value", "logits"], part, rtol=1e-10, atol=1e-10)


def test_a_stage_of_both_hands_over_to_one_of_another_grid(llama: Case) -> None:
    stages = Stage((0, 1, 2, 3), (2, 1), context=2, context_ratios=(3, 1)), Stage((4, 5), context=2)
    plan = Plan((Pipeline(stages, micro_batches=2), Pipeline((Stage((6,)),))))
    first, last = (device_graph(llama.program, plan, rank) for rank in (1, 4))
    (sent,) = first.handovers_out
    assert sent.value.annotation.ranks == (0, 1, 2, 3)
    assert sent.target_annotation.ranks == (4, 5)
    assert not sent.value.annotation.has_partial
    assert [line.split(":")[0] for line in talk(first)][-1] == "all_gather [1, 3] 1 [floordiv, sub] 1 1 duplicate"
    assert not any("[0, 1]" in line for line in talk(last))


def test_each_axis_is_priced_among_its_own_devices_for_what_they_have(llama: Case) -> None:
    annotated = deduced(llama.program, grid((3, 1), (2, 1))).annotated
    context, tensor = (axis_prices(annotated, axis) for axis in (CONTEXT, TENSOR))
    assert context.groups == ((0, 2), (1, 3))
    assert tensor.groups == ((0, 1), (2, 3))
    alone = axis_prices(deduced(llama.program, Plan.tensor_parallel((0, 1))).annotated, TENSOR)
    (weight,) = (leaf.node for leaf in annotated.graph.leaves if leaf.name == "model.layers.0.self_attn.k_proj.weight")
    (read,) = weight.users
    assert context.num_bytes[weight] == pytest.approx(alone.num_bytes[weight] * 2 / 3)
    assert tensor.num_bytes[weight] == alone.num_bytes[weight]
    assert tensor.num_bytes[read] == pytest.approx(alone.num_bytes[read] * 3 / 4)
    assert context.num_bytes[read] == pytest.approx(alone.num_bytes[read] * 2 / 3)


class Flattened(nn.Module):
    """Sees positions and features as one dim, which it gives out too where it `shows` that."""

    def __init__(self, normed: bool, shows: bool) -> None:
        super().__init__()
        self.normed, self.shows = normed, shows
        self.first, self.last = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        flat = torch.relu(self.first(x)).flatten(1)
        y = flat.softmax(-1) if self.normed else flat * 2
        loss = (self.last(y.unflatten(1, (x.shape[1], 24))) ** 2).sum()
        return {"loss": loss, "flat": flat} if self.shows else {"loss": loss}


@pytest.mark.parametrize("normed", [False, True])
def test_a_dim_of_positions_and_split_features_is_cut_in_both_and_put_together_before(normed: bool) -> None:
    model, x = Flattened(normed, shows=False).double(), torch.randn(3, 7, 8).double()
    program = program_of(model, (x,))
    for plan in (grid((3, 1), (2, 1)), Plan.context_parallel((0, 1), (3, 1))):
        same_in_group(program, model, plan, {"0": x}, limit=1e-10)


def test_an_output_of_which_both_axes_cut_one_dim_is_refused_by_name() -> None:
    program = program_of(Flattened(normed=False, shows=True).double(), (torch.randn(3, 7, 8).double(),))
    with pytest.raises(DeductionError, match=r"dim 1 of 'flatten.*both would be cut over devices \[0, 1, 2, 3\]"):
        device_graph(program, grid((3, 1), (2, 1)), 0, wants_values=True)
