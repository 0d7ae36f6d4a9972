"""A group that shares the sequence and passes keys and values round: what it talks, what it computes, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.deduce import Deduce
from hetu_fx.transforms.layouts.states import WHOLE, SplitOn
from hetu_fx.transforms.rewrites.per_sequence import PER_SEQUENCE
from hetu_fx.transforms.specialize.specialize import Specialize
from tests.model_zoo import NO_DROPOUT, SAMPLES, to_double
from tests.oracles.traffic import traffic_by_block
from tests.transforms.cases import LENGTH, Case
from tests.transforms.layouts.test_context_parallel import CUTS, Documents, packed
from tests.transforms.plans import deduced, device_graph, program_of, same_in_group, talk

pytestmark = pytest.mark.usefixtures("losses_in_double")

BLOCK = "forward 1 ring_attention; backward 1 ring_attention_backward"
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
EVEN = Plan.context_parallel((0, 1))
LAYER = (
    "ring_attention add_tensor_{0} transpose_int_{1} None None None [0, 1] [floordiv, sub] [floordiv, sub] True "
    "0.3535533905932738: add.Tensor -> getitem"
)


def ring(ratios: tuple[int, ...] = (1, 1)) -> Plan:
    return replace(Plan.context_parallel(tuple(range(len(ratios))), ratios), attention="ring")


def test_a_layer_passes_its_keys_and_values_round_and_sends_nothing_else(llama: Case) -> None:
    device = device_graph(llama.program, ring(), 1)
    lines = talk(device)
    assert [line for line in lines if line.startswith("ring")] == [LAYER.format(2, 2), LAYER.format(8, 6)]
    assert [line.split(" ", 1)[0] for line in lines if not line.startswith("ring")] == [
        *["local_slice"] * 3,
        "all_reduce",
    ]
    found = traffic_by_block(device, llama.program.graph.block_paths)
    assert [str(found[block]) for block in (0, 1)] == [BLOCK, BLOCK]


@pytest.mark.parametrize(("ratios", "length"), CUTS)
def test_loss_and_gradients_with_grouped_heads_are_those_of_one_device(
    llama: Case, ratios: tuple[int, ...], length: int
) -> None:
    llama.same_as_alone(ring(ratios), length)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_causal_and_padded_attention_without_dropout_are_those_of_one_device(name: str) -> None:
    def batch(length: int) -> Mapping[str, Tensor]:
        return to_double(SAMPLES[name].batch(4, length))

    model = SAMPLES[name].model(**NO_DROPOUT[name]).double().train()
    program = program_of(model, batch(LENGTH))
    for ratios, length in CUTS:
        devices = same_in_group(program, model, ring(ratios), batch(length), limit=1e-10)
        assert sum(line.startswith("ring_attention") for line in talk(devices[0])) == 2


def test_a_sequence_of_fixed_length_is_cut_in_numbers(vit: Case) -> None:
    lines = talk(device_graph(vit.program, ring(), 0))
    assert sum("[8, 9] [8, 9]" in line for line in lines if line.startswith("ring")) == 2
    vit.same_as_alone(ring((1, 40)), LENGTH)


def test_packed_rows_stay_apart_under_a_mask_cut_by_queries(llama: Case) -> None:
    program = program_of(llama.model, packed(LENGTH))
    for ratios, length in CUTS[1:4]:
        same_in_group(program, llama.model, ring(ratios), packed(length), limit=1e-10)
    assert not any(line.startswith("all_gather") for line in talk(device_graph(program, ring(), 1)))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_mask_is_made_for_the_queries_of_the_part_alone(is_packed: bool) -> None:
    """One that keeps documents apart, or lets through what is of the same or an earlier one."""

    def batch(length: int) -> dict[str, Tensor]:
        return {"x": torch.randn(3, length, 8).double(), "document": torch.arange(length).expand(3, -1) // 3}

    model = ManyHeads(is_packed).double().train()
    program = program_of(model, batch(7))
    context = deduced(program, ring()).context
    (node,) = program.graph.graph.find_nodes(op="call_function", target=PER_SEQUENCE if is_packed else ATTENTION)
    states = [need.state for need in context.needs(node)]
    assert context.decisions[node].travels
    assert [type(state) for state in states[:4]] == [SplitOn] * 4
    assert not is_packed or (type(states[4]), states[5]) == (SplitOn, WHOLE)
    for ratios, length in CUTS:
        same_in_group(program, model, ring(ratios), batch(length), limit=1e-10)


class ManyHeads(Documents):
    """Has a dim for the one head."""

    def __init__(self, is_packed: bool) -> None:
        super().__init__(False)
        self.sees = torch.eq if is_packed else torch.ge

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        same = self.sees(document.unsqueeze(2), document.unsqueeze(1)).unsqueeze(1)
        q, k, v = (y.unsqueeze(1) for y in (self.query(x), self.key(x), x))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=same)
        return (self.out(x + y.squeeze(1)) ** 2).sum()


class TwoTexts(nn.Module):
    """Attends from one text to another of its own length."""

    def __init__(self, dropout: float = 0.0, trained_mask: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        self.query, self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(1, 2, 1, 1)) if trained_mask else None

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (self.query(x), self.key(other), other))
        mask = None if self.bias is None else self.bias.expand(-1, -1, x.shape[1], other.shape[1])
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)
        return (self.out(x + y.transpose(1, 2).flatten(2)) ** 2).sum()


def texts(length: int, other: int) -> dict[str, Tensor]:
    return {"x": torch.randn(3, length, 8).double(), "other": torch.randn(3, other, 8).double()}


def test_keys_of_another_text_go_round_in_their_own_parts() -> None:
    model = TwoTexts().double().train()
    program = program_of(model, texts(7, 5))
    for (ratios, length), other in zip(CUTS, (3, 6, 9, 1, 4), strict=True):
        devices = same_in_group(program, model, ring(ratios), texts(length, other), limit=1e-10)
        assert any(line.startswith("ring_attention") for line in talk(devices[0]))


class WithinPositions(nn.Module):
    """Attends within each position of a sequence, over a dim of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.scaled_dot_product_attention(x, self.key(x), x)
        return (self.out(x + y) ** 2).sum()


def test_attention_that_needs_no_other_part_is_no_ring() -> None:
    model, x = WithinPositions().double().train(), torch.randn(3, 7, 5, 8).double()
    program = program_of(model, {"x": x})
    devices = same_in_group(program, model, Plan.context_parallel((0, 1), (3, 1)), {"x": x}, limit=1e-10)
    assert [line.split(" ", 1)[0] for line in talk(devices[0])] == ["local_slice", "all_reduce"]
    with pytest.raises(PlanError, match="no attention that can pass"):
        deduced(program, ring())


@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"trained_mask": True}])
def test_attention_with_dropout_or_a_trained_mask_gathers(options: dict[str, Any]) -> None:
    program = program_of(TwoTexts(**options).double().train(), texts(7, 5))
    assert not any(line.startswith("ring") for line in talk(device_graph(program, EVEN, 0)))
    with pytest.raises(PlanError, match="'ring', but this model has no attention that can pass keys and values round"):
        deduced(program, ring())


def is_ring(program: Program, plan: Plan, topology: Cluster | None) -> bool:
    """Tell how attention runs under a plan on given devices and links."""
    annotated = Annotate(plan, False)(program.analysed)
    device = Specialize(0)(Deduce(topology)(annotated))
    assert device is not None
    return any(line.startswith("ring_attention") for line in talk(device))


def program_of_length(length: int) -> Program:
    return program_of(TwoTexts().double().train(), texts(length, length))


def test_a_ring_is_chosen_where_the_work_hides_the_transfers() -> None:
    short, long = program_of_length(8), program_of_length(2000)
    cluster = Cluster.on_paper([1e9, 1e9], intra=Link(1e9, 1e-5))
    assert [is_ring(program, EVEN, cluster) for program in (short, long)] == [False, True]
    fast = Cluster.on_paper([1e14, 1e14], intra=Link(1e9, 1e-5))
    assert not is_ring(long, EVEN, fast)
    assert [is_ring(short, replace(EVEN, attention=way), cluster) for way in ("gathered", "ring")] == [False, True]
    assert [is_ring(long, replace(EVEN, attention=way), cluster) for way in ("gathered", "ring")] == [False, True]


def test_no_ring_is_chosen_where_devices_lose_more_by_meeting_in_each_of_its_steps() -> None:
    program = program_of_length(2000)
    for lost, expected in ((0.0, True), (1.0, False)):
        cluster = Cluster.on_paper([1e8] * 4, intra=Link(1e8, 1e-5), meeting_seconds=[lost] * 4)
        assert is_ring(program, Plan.context_parallel(range(4)), cluster) == expected


def test_a_ring_is_chosen_where_gathered_keys_and_values_would_fill_the_memory() -> None:
    program = program_of_length(100)
    sizes = [1e14, 1e14]
    parameters, gathered = 4 * 8 * (3 * 64 + 3 * 8), 2 * 3 * 100 * 8 * 8
    for left, expected in ((2.01 * gathered, False), (1.99 * gathered, True)):
        cluster = Cluster.on_paper(sizes, memory_bytes=int(parameters + left), intra=Link(1e9, 1e-5))
        assert is_ring(program, EVEN, cluster) == expected


def test_a_plan_that_shares_no_sequence_has_no_say_in_how_it_attends() -> None:
    with pytest.raises(PlanError, match="attention is 'ring', but no stage shares the sequence"):
        replace(Plan.single(), attention="ring")
    with pytest.raises(PlanError, match=r"unknown attention 'rings' \(did you mean 'ring'\?\)"):
        replace(EVEN, attention="rings")  # type: ignore[arg-type]
    assert Plan.from_json(ring().to_json()) == ring() != EVEN
    assert "ring attention" in str(ring())
