"""The graph of one device: where it talks, what it computes, and that all devices together compute the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation, Duplicate
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.transforms.show import op_name
from hetu_fx.transforms.specialize.device_graph import SlotKind
from hetu_fx.transforms.specialize.specialize import Specialize
from tests.model_zoo import SAMPLES, ConvNet
from tests.transforms.plans import (
    deduced,
    device_graph,
    feeder,
    pipeline,
    program_of,
    run_in_lockstep,
    same_as_one_device,
    talk,
    zoo_program,
)

UNEVEN = Plan.tensor_parallel((0, 1), (2, 1))  # heads 2:1, feed-forward 75:37

LLAMA_LAYER = """\
identity [0, 1]: mul.Tensor({0}.input_layernorm) -> linear({0}.self_attn.q_proj), \
linear({0}.self_attn.k_proj), linear({0}.self_attn.v_proj)
all_reduce [0, 1] duplicate: linear({0}.self_attn.o_proj) -> add.Tensor
identity [0, 1]: mul.Tensor({0}.post_attention_layernorm) -> linear({0}.mlp.gate_proj), linear({0}.mlp.up_proj)
all_reduce [0, 1] duplicate: linear({0}.mlp.down_proj) -> add.Tensor"""

# The vocabulary: what each part has of the rows looked up; then peak and sum of each row's scores, and its target's.
TABLE = "all_reduce [0, 1] duplicate: masked_fill.Scalar -> to.dtype, add.Tensor"
SCORES = """\
identity [0, 1]: mul.Tensor(model.norm) -> linear(lm_head)
all_gather [0, 1] 1 [2, 2] 1 1 duplicate: cat -> slice.Tensor, slice.Tensor
all_reduce [0, 1] duplicate: masked_fill.Scalar -> sub.Tensor"""

# Mean and variance, whose cotangents are summands too, then their running averages.
BATCH_NORM = """\
split_all_reduce P(2) over {[0,1] S(1, 2:1); [2]} -> D(2) over {[0,1] S(1, 2:1); [2]} of 1x12x1x1 partial: div.Tensor -> sub.Tensor
split_all_reduce P(2) over {[0,1] S(1, 2:1); [2]} -> D(2) over {[0,1] S(1, 2:1); [2]} of 1x12x1x1 partial: div.Tensor -> add.Tensor
split_all_reduce P(2) over {[0,1] S(0, 2:1); [2]} -> D(2) over {[0,1] S(0, 2:1); [2]} of 12 duplicate: mul.Tensor -> add.Tensor
split_all_reduce P(2) over {[0,1] S(0, 2:1); [2]} -> D(2) over {[0,1] S(0, 2:1); [2]} of 12 duplicate: mul.Tensor -> add.Tensor"""  # noqa: E501


class TwoLayers(nn.Module):
    """Both layers with a bias, so that a bias that is added twice shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Chosen(nn.Module):
    """The number of positive activations is known only when they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        chosen = y[y.sum(1) > 0]
        return self.second(chosen) * chosen.shape[0]


@pytest.fixture(scope="module")
def conv() -> Program:
    return program_of(ConvNet().train(), SAMPLES["conv"].batch(4, 0))


@pytest.fixture(scope="module")
def llama() -> Program:
    return zoo_program("llama")


def shapes(program: Program, plan: Plan, rank: int) -> dict[str, tuple[int | None, ...]]:
    """Local shapes of all parameters on a rank of a plan of one stage."""
    made = deduced(program, plan)
    lies = {leaf: made.value_annotation(leaf.node, made.annotated.layouts[0]) for leaf in made.parameters()}
    return {leaf.name: at.local_shape(rank, made.shape(leaf.node)) for leaf, at in lies.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_transformer_layer_talks_twice_forward_and_twice_backward(llama: Program, rank: int) -> None:
    layers = [LLAMA_LAYER.format(f"model.layers.{layer}") for layer in (0, 1)]
    assert "\n".join(talk(device_graph(llama, UNEVEN, rank))) == "\n".join([TABLE, *layers, SCORES])


def test_each_device_reads_its_parts_of_the_parameters(llama: Program) -> None:
    first, second = (shapes(llama, UNEVEN, rank) for rank in (0, 1))
    layer = "model.layers.1"
    assert first[f"{layer}.self_attn.q_proj.weight"] == (32, 48)
    assert second[f"{layer}.self_attn.q_proj.weight"] == (16, 48)
    assert first[f"{layer}.mlp.down_proj.weight"] == (48, 75)
    assert second[f"{layer}.mlp.down_proj.weight"] == (48, 37)
    assert (first["lm_head.weight"], second["lm_head.weight"]) == ((65, 48), (32, 48))
    assert first["model.norm.weight"] == second["model.norm.weight"] == (48,)


def test_one_device_talks_to_nobody(llama: Program) -> None:
    assert talk(device_graph(llama, Plan.single(), 0)) == []


def test_replicas_of_a_transformer_do_not_talk_in_the_middle(llama: Program) -> None:
    plan = Plan((pipeline((0, 1), ratios=(2, 1)), pipeline((2,))))
    assert talk(device_graph(llama, plan, 2)) == []
    assert talk(device_graph(llama, plan, 0)) == talk(device_graph(llama, UNEVEN, 0))


def test_a_rank_that_the_plan_leaves_out_has_no_graph(llama: Program) -> None:
    assert Specialize(1)(deduced(llama, Plan.single(0))) is None


def test_a_rank_has_a_graph_for_each_chunk_of_its_stage() -> None:
    # blocks of a decoder read what stands before them all, and what the encoder has made
    made = deduced(zoo_program("t5"), Plan((pipeline((0,), (1,)),), schedule="interleaved"))
    first, second, none = (Specialize(0, chunk)(made) for chunk in range(3))
    assert first is not None
    assert second is not None
    assert none is None
    assert [(part.layout.index, part.num_stages) for part in (first, second)] == [(0, 4), (2, 4)]
    stays = [handover.value.name for handover in first.handovers_out if handover.target == (0, 2)]
    came = {handover.value.name: handover.source for handover in second.handovers_in}
    assert {came[name] for name in stays} == {(0, 0)}
    assert set(came.values()) == {(0, 0), (0, 1)}


@pytest.mark.parametrize("ratios", [(1, 1), (2, 1), (1, 9)])
def test_the_devices_of_a_group_compute_the_model_together(ratios: tuple[int, int]) -> None:
    model, x = TwoLayers(), torch.randn(4, 6)
    program, plan = program_of(model, (x,)), Plan.tensor_parallel((0, 1), ratios)
    devices = {rank: device_graph(program, plan, rank, wants_values=True) for rank in (0, 1)}
    results = run_in_lockstep(devices, feeder(program, plan, model, {"0": x}))
    for rank in (0, 1):
        torch.testing.assert_close(results[rank]["value", "output"], model(x))


def test_only_the_first_device_adds_the_bias_of_a_row_split() -> None:
    program = program_of(TwoLayers(), (torch.randn(4, 6),))
    ops = [
        [op_name(node) for node in device_graph(program, UNEVEN, rank, wants_values=True).graph.nodes]
        for rank in (0, 1)
    ]
    assert [names.count("fill.Scalar") for names in ops] == [0, 1]


def test_batch_norm_sums_over_unequal_replicas(conv: Program) -> None:
    plan = Plan((pipeline((0, 1), ratios=(2, 1)), pipeline((2,))))
    lines = [talk(device_graph(conv, plan, rank)) for rank in (0, 2)]
    assert lines[0][:4] == BATCH_NORM.splitlines()
    calls = [[line.rpartition(": ")[0] for line in each if line.startswith("split_all_reduce")] for each in lines]
    assert calls[0] == calls[1]


def test_batch_norm_sums_over_equal_replicas_by_one_collective(conv: Program) -> None:
    lines = talk(device_graph(conv, Plan.data_parallel((0, 1), (3, 1)), 1))
    assert {line.partition(":")[0] for line in lines} == {"all_reduce [0, 1] partial", "all_reduce [0, 1] duplicate"}


def test_a_value_goes_from_two_devices_to_one(llama: Program) -> None:
    plan = Plan((pipeline((0, 1), (2,), ratios=(2, 1)),))
    (sent,), (received,) = device_graph(llama, plan, 0).handovers_out, device_graph(llama, plan, 2).handovers_in
    assert (sent.source, sent.target) == (received.source, received.target) == ((0, 0), (0, 1))
    assert sent.value.annotation == received.value.annotation == Annotation.on((0, 1), Duplicate(2))
    assert sent.target_annotation == received.target_annotation == Annotation.on((2,))
    assert (sent.value.shape[-1], sent.value.differentiable) == (48, True)


def test_a_stage_has_its_own_slots_and_results_only(llama: Program) -> None:
    plan = Plan((pipeline((0, 1), (2,)),))
    first, last = (device_graph(llama, plan, rank) for rank in (0, 2))
    assert [slot.name for slot in last.slots if slot.kind is SlotKind.RECEIVED] == [r.name for r in first.results]
    assert [(r.kind.value, r.name) for r in last.results] == [("loss", "loss")]
    assert not any("layers.1" in slot.name for slot in first.slots)
    assert all("layers.1" in slot.name for slot in last.slots if "layers" in slot.name)


def test_a_size_made_of_activations_is_made_by_the_stage_that_reads_it() -> None:
    program = program_of(Chosen(), (torch.randn(4, 6),))
    plan = Plan((pipeline((0,), (1,)),))
    first, second = (device_graph(program, plan, rank, wants_values=True) for rank in (0, 1))
    taken, received = second.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor), second.slots
    assert len(taken) == 1
    assert [slot.name for slot in received if slot.kind is SlotKind.RECEIVED] == [one.name for one in first.results]


def test_columns_of_the_batch_are_cut_where_a_group_splits_them() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 14), nn.Tanh(), nn.Linear(14, 5)).double()
    plan = replace(Plan.tensor_parallel((0, 1), (2, 1)), split=(("0.weight", 1),))
    batch = (torch.randn(4, 9, dtype=torch.float64),)
    devices = same_as_one_device(net, batch, plan, loss_fn=lambda output, x: output.square().mean())
    assert any(op_name(node) == "hetu.local_slice" for node in devices[0].graph.nodes)
