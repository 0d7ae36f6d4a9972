"""A group that shares the sequence, attention included: what it talks, and that it computes a model of any length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.states import WHOLE, SplitOn
from tests.model_zoo import SAMPLES
from tests.oracles.traffic import traffic_by_block
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

EVEN = Plan.context_parallel((0, 1))
BLOCK = "forward 2 all_gather; backward 2 reduce_scatter"

# (ratios, length): lengths that do not divide, shares of nothing, fewer positions than devices, more devices than
# key-value heads.
CUTS = [((1, 1), 8), ((3, 1), 11), ((1, 9), 5), ((1, 1, 1, 1), 2), ((5, 1, 2), 7)]

LLAMA_LAYER = """\
all_gather [0, 1] 1 [floordiv, sub] 1 1 partial: linear({0}.self_attn.v_proj) -> reshape
all_gather [0, 1] 2 [floordiv, sub] 1 1 partial: add.Tensor -> slice.Tensor"""


class Documents(nn.Module):
    """Attention, written out or not, whose mask is made of the documents that packed tokens belong to."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.written_out = written_out
        self.query, self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        same = document.unsqueeze(2) == document.unsqueeze(1)
        q, k = self.query(x), self.key(x)
        if self.written_out:
            scores = (q @ k.transpose(1, 2)).view(x.shape[0], x.shape[1], -1)
            y = nn.functional.dropout(scores.masked_fill(~same, -1e9).softmax(-1), 0.3) @ x
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, x, attn_mask=same)
        return (self.out(x + y) ** 2).sum()


class PooledMean(nn.Module):
    """Takes a mean over the sequence, and multiplies by how long it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        z = y.reshape(-1, 24).reshape(y.shape[0], -1, 4, 6).flatten(2) * y.shape[1]
        return (self.last(z.mean(1)) ** 2).sum()


class Convolved(nn.Module):
    """Convolves over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.over = nn.Linear(8, 24), nn.Conv1d(24, 24, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.over(self.first(x).transpose(1, 2)) ** 2).sum()


def shared(ratios: tuple[int, ...]) -> Plan:
    return Plan.context_parallel(tuple(range(len(ratios))), ratios)


def blocks_of(program: Program) -> list[str]:
    found = traffic_by_block(device_graph(program, EVEN, 0), program.graph.block_paths)
    return [str(found[block]) for block in sorted(block for block in found if block is not None)]


def test_a_layer_gathers_its_keys_and_its_values_once_each_and_reads_grouped_heads_unrepeated(llama: Case) -> None:
    lines = talk(device_graph(llama.program, EVEN, 1))
    layers = [LLAMA_LAYER.format(f"model.layers.{layer}") for layer in (0, 1)]
    assert [line for line in lines if line.startswith("all_gather")] == "\n".join(layers).split("\n")
    assert [line.split(" ", 1)[0] for line in lines if not line.startswith("all_gather")] == [
        *["local_slice"] * 3,
        "all_reduce",
    ]


def test_forward_and_backward_of_a_block_gather_and_scatter_twice(llama: Case, gpt2: Case, bert: Case) -> None:
    for case in (llama, gpt2, bert):
        assert blocks_of(case.program) == [BLOCK, BLOCK]


def test_an_encoder_and_a_decoder_gather_what_is_attended_to(t5: Case) -> None:
    twice = "forward 4 all_gather; backward 4 reduce_scatter"
    assert blocks_of(t5.program) == [BLOCK, BLOCK, twice, twice]
    t5.same_as_alone(shared((3, 1)), 10)


@pytest.mark.parametrize(("ratios", "length"), CUTS)
def test_loss_and_gradients_with_grouped_heads_are_those_of_one_device(
    llama: Case, ratios: tuple[int, ...], length: int
) -> None:
    llama.same_as_alone(shared(ratios), length)


@pytest.mark.parametrize(("ratios", "length"), CUTS)
def test_loss_and_gradients_with_dropout_are_those_of_one_device(
    gpt2: Case, ratios: tuple[int, ...], length: int
) -> None:
    gpt2.same_as_alone(shared(ratios), length)


@pytest.mark.parametrize(("ratios", "length"), CUTS)
def test_loss_and_gradients_with_padding_are_those_of_one_device(
    bert: Case, ratios: tuple[int, ...], length: int
) -> None:
    bert.same_as_alone(shared(ratios), length)


@pytest.mark.parametrize("ratios", [(1, 1), (1, 40)])
def test_a_sequence_of_fixed_length_is_cut_in_numbers(vit: Case, ratios: tuple[int, ...]) -> None:
    assert "[8, 9]" in talk(device_graph(vit.program, EVEN, 0))[0]
    vit.same_as_alone(shared(ratios), LENGTH)


def packed(length: int) -> dict[str, Tensor]:
    """Rows of two documents each but for the last, with positions that restart and a mask that keeps them apart."""
    batch = {**batch_of("llama", length)}
    document = (torch.arange(length) >= length - length // 3).long().expand(4, -1).clone()
    document[-1] = 0
    first = length - length // 3
    batch["position_ids"] = torch.arange(length) - document * first
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    batch["attention_mask"] = ((document[:, :, None] == document[:, None, :]) & causal)[:, None]
    return batch


def test_packed_rows_stay_apart_under_a_mask_cut_by_queries(llama: Case) -> None:
    program = program_of(llama.model, packed(LENGTH))
    for ratios, length in CUTS[1:4]:
        same_in_group(program, llama.model, shared(ratios), packed(length), limit=1e-10)
    lines = talk(device_graph(program, EVEN, 1))
    assert sum("attention_mask -> scaled_dot_product_attention" in line for line in lines) == 1
    assert sum("position_ids" in line for line in lines) == 1
    assert sum(line.startswith("all_gather") for line in lines) == 4


@pytest.mark.parametrize("written_out", [False, True])
def test_a_mask_is_made_for_the_queries_of_the_part_alone(written_out: bool) -> None:
    model = Documents(written_out).double().train()

    def batch(length: int) -> dict[str, Tensor]:
        return {"x": torch.randn(3, length, 8).double(), "document": torch.arange(length).expand(3, -1) // 3}

    program = program_of(model, batch(7))
    context = deduced(program, EVEN).context
    (equal,) = (node for node in program.graph.graph.nodes if node.target is torch.ops.aten.eq.Tensor)
    rows, columns = context.needs(equal)
    assert (type(rows.state), columns.state, type(context.states[equal])) == (SplitOn, WHOLE, SplitOn)
    for ratios, length in CUTS:
        same_in_group(program, model, shared(ratios), batch(length), limit=1e-10)


def test_a_mean_over_the_sequence_and_rows_flattened_with_it_are_those_of_all() -> None:
    model = PooledMean().double()
    program = program_of(model, (torch.randn(3, 7, 8).double(),))
    for ratios, length in CUTS:
        same_in_group(program, model, shared(ratios), {"0": torch.randn(3, length, 8).double()}, limit=1e-10)


def test_parameters_are_whole_and_their_gradients_are_summands(llama: Case) -> None:
    made = deduced(llama.program, EVEN)
    for leaf in made.parameters():
        held, gradient = made.parameter_annotations(leaf)
        assert not held.shardings[0].splits
        assert gradient.has_partial


class FixedLength(nn.Module):
    """Reads a length that it then turns out to be made for, of what devices have parts of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(8, 6), nn.Parameter(torch.randn(7, 6)), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return (self.last(y * y.shape[1] + self.table) ** 2).sum()


def test_a_length_that_is_fixed_in_the_end_is_that_of_the_whole() -> None:
    model = FixedLength().double()
    program = program_of(model, (torch.randn(3, 7, 8).double(),))
    same_in_group(program, model, shared((3, 1)), {"0": torch.randn(4, 7, 8).double()}, limit=1e-10)


def test_an_output_is_put_together(llama: Case) -> None:
    plan, batch = shared((1, 2, 3)), batch_of("llama", 7)
    devices = {rank: device_graph(llama.program, plan, rank, wants_values=True) for rank in plan.devices}
    results = run_in_lockstep(devices, feeder(llama.program, plan, llama.model, batch))
    expected = llama.model(**batch).logits
    for rank in plan.devices:
        torch.testing.assert_close(results[rank]["value", "logits"], expected, rtol=1e-10, atol=1e-10)


def test_stages_that_share_the_sequence_stand_beside_tensor_parallel_ones(llama: Case) -> None:
    front = Pipeline((Stage((0, 1), (3, 1), context=2), Stage((2, 3))), micro_batches=2)
    plan = Plan((front, Pipeline((Stage((4, 5)),))))
    made = deduced(llama.program, plan)
    first, last, beside = (device_graph(llama.program, plan, rank) for rank in (0, 2, 4))
    (sent,) = first.handovers_out
    assert not sent.value.annotation.shardings[0].splits
    assert talk(first)[-1].startswith("all_gather [0, 1] 1 [floordiv, sub] 1 1 duplicate: add.Tensor")
    for device in (last, beside):
        assert not any(line.startswith(("local_slice", "reduce_scatter")) for line in talk(device))
    projection = next(leaf for leaf in made.parameters() if leaf.name.endswith("layers.0.mlp.up_proj.weight"))
    held, _ = made.parameter_annotations(projection)
    assert [bool(sharding.splits) for sharding in held.shardings] == [False, True]


def test_a_product_over_the_whole_sequence_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"cannot share the sequence \(context 2\): aten.conv1d.*needs all of it"):
        deduced(program_of(Convolved(), (torch.randn(3, 7, 8),)), EVEN)
    with pytest.raises(PlanError, match=r"cannot share the sequence \(context 2\): .*grouped_mm.*needs all of it"):
        deduced(program_of(SAMPLES["mixtral"].model().train(), SAMPLES["mixtral"].batch(4, LENGTH)), EVEN)


def test_a_model_without_a_sequence_is_refused() -> None:
    program = program_of(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6)), (torch.randn(4, 6),))
    with pytest.raises(PlanError, match="the plan asks for context, but apart from the rows of the batch"):
        deduced(program, EVEN)
