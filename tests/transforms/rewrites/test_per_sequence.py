"""Attention under masks of packed rows becomes attention in each sequence, with the loss and gradients of the mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hetu_fx.graph.calls import argument
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.simplify import ATTENTION
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.transforms.rewrites.per_sequence import PER_SEQUENCE, PLACES, PerSequence
from tests.graph.compare import assert_same_as_eager
from tests.model_zoo import llama
from tests.transforms.cases import batch_of
from tests.transforms.plans import device_graph, program_of, same_in_group, talk

Mask = Callable[[Tensor, Tensor], Tensor]
HEADS, CHANNELS = 4, 3


class Attends(nn.Module):
    """Attention whose mask is made of position ids, or of the numbers of documents."""

    def __init__(self, mask: Mask, groups: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.mask, self.groups, self.dropout = mask, groups, dropout
        self.query = nn.Linear(5, HEADS * CHANNELS)
        self.key, self.value = nn.Linear(5, groups * CHANNELS), nn.Linear(5, groups * CHANNELS)

    def forward(self, x: Tensor, position_ids: Tensor, document: Tensor) -> Tensor:
        query, key, value = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
        if self.groups < HEADS:
            key, value = self.repeated(key), self.repeated(value)
        mask = self.mask(position_ids, document)
        return (scaled_dot_product_attention(query, key, value, mask, self.dropout) ** 2).sum()

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, CHANNELS).transpose(1, 2)

    def repeated(self, x: Tensor) -> Tensor:
        """Repeat each head for the query's heads of its group, as transformers does."""
        rows, groups, tokens, channels = x.shape
        many = x[:, :, None].expand(rows, groups, HEADS // groups, tokens, channels)
        return many.reshape(rows, HEADS, tokens, channels)


def same(x: Tensor) -> Tensor:
    return x[:, None, :, None] == x[:, None, None]


def number(positions: Tensor) -> Tensor:
    """Number tokens by where positions do not go on by one."""
    return (torch.diff(positions, dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)


def triangle(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    return places <= places[:, None]


def by_positions(positions: Tensor, _: Tensor) -> Tensor:
    return same(number(positions)) & (positions[:, None, None] <= positions[:, None, :, None])


def by_places(positions: Tensor, _: Tensor) -> Tensor:
    return same(number(positions)) & triangle(positions)


def both_ways(positions: Tensor, _: Tensor) -> Tensor:
    return same((positions == 0).cumsum(1))


def by_documents(_: Tensor, document: Tensor) -> Tensor:
    return same(document) & triangle(document)


def in_a_window(positions: Tensor, _: Tensor) -> Tensor:
    places = torch.arange(positions.shape[1])
    return by_places(positions, _) & (places > places[:, None] - 2)


def with_a_bias(positions: Tensor, _: Tensor) -> Tensor:
    distance = (positions[:, None, None] - positions[:, None, :, None]).double()
    return torch.where(by_places(positions, _), distance, torch.full((), -math.inf, dtype=torch.float64))


def by_restarts(positions: Tensor, _: Tensor) -> Tensor:
    """Compare positions in sequences that are counted by zeros: that these go on by one is not to be seen."""
    return same((positions == 0).cumsum(1)) & (positions[:, None, None] <= positions[:, None, :, None])


def nearly_hidden(positions: Tensor, _: Tensor) -> Tensor:
    return torch.where(by_places(positions, _), 0.0, torch.full((), -1e9, dtype=torch.float64))


def across(positions: Tensor, document: Tensor) -> Tensor:
    return same(number(positions)) | same(document)


def batch(rows: int = 3, length: int = 9, comes_back: bool = False) -> dict[str, Tensor]:
    """Return rows of two sequences; with `comes_back` the last tokens of a row are of its first document again."""
    torch.manual_seed(0)
    begins = torch.tensor([[length // 3], [length // 2], [0]])[:rows]
    places = torch.arange(length).expand(rows, -1)
    document = (places >= begins).long()
    positions = torch.where(places < begins, places, places - begins)
    document = document.masked_fill(places >= length - 2, 0) if comes_back else document
    return {"x": torch.randn(rows, length, 5).double(), "position_ids": positions, "document": document}


def rewritten(mask: Mask, groups: int = HEADS, dropout: float = 0.0) -> tuple[nn.Module, Graph]:
    model = Attends(mask, groups, dropout).double()
    return model, PerSequence()(capture(model, batch(), training=True))


def attentions(graph: Graph) -> list[str]:
    """Tell what attention there is: per sequence, causal, with a mask; or as it was."""
    found = []
    for node in graph.graph.find_nodes(op="call_function", target=PER_SEQUENCE):
        kept = argument(node, "attn_mask") is not None
        found.append(f"per sequence{', causal' * argument(node, 'is_causal')}{', with its mask' * kept}")
    return found + ["under its mask"] * len(graph.graph.find_nodes(op="call_function", target=ATTENTION))


@pytest.mark.parametrize(
    ("mask", "attention"),
    [
        (by_positions, "per sequence, causal"),
        (by_places, "per sequence, causal"),
        (both_ways, "per sequence"),
        (by_documents, "per sequence, with its mask"),
        (in_a_window, "per sequence, with its mask"),
        (with_a_bias, "per sequence, with its mask"),
        (by_restarts, "per sequence, with its mask"),
        (nearly_hidden, "under its mask"),
        (across, "under its mask"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_loss_and_gradients_are_those_under_the_mask(mask: Mask, attention: str) -> None:
    for groups in (HEADS, 1):
        model, graph = rewritten(mask, groups)
        assert attentions(graph) == [attention]
        for rows, length in ((3, 9), (2, 13)):
            assert_same_as_eager(model, graph, batch(rows, length), 1e-12)


def test_a_document_that_comes_back_in_a_row_is_one_with_all_that_stands_between() -> None:
    model, graph = rewritten(by_documents)
    assert_same_as_eager(model, graph, batch(comes_back=True), 1e-12)


def test_heads_of_a_group_are_read_in_place_and_no_mask_is_made() -> None:
    _, graph = rewritten(by_positions, groups=2)
    (node,) = graph.graph.find_nodes(op="call_function", target=PER_SEQUENCE)
    assert argument(node, "enable_gqa")
    assert len(graph.graph.find_nodes(op="call_function", target=PLACES)) == 1
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.eq.Tensor)


def test_attention_that_drops_weights_out_is_left_as_it_is() -> None:
    _, graph = rewritten(by_positions, dropout=0.5)
    assert attentions(graph) == ["under its mask"]


def packed(length: int) -> dict[str, Tensor]:
    positions = batch(3, length)["position_ids"]
    return {**batch_of("llama", length), "position_ids": torch.cat([positions, positions[:1]])}


@pytest.fixture(name="packed_llama", scope="module")
def _packed_llama() -> tuple[nn.Module, Program]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        model = llama(use_cache=False).double().train()
        return model, program_of(model, packed(11))


PLANS = {
    "heads": Plan.tensor_parallel((0, 1)),
    "tokens": Plan.context_parallel((0, 1, 2), (5, 1, 2)),
    "ring": replace(Plan.context_parallel((0, 1, 2), (5, 1, 2)), attention="ring"),
    "heads of tokens": replace(Plan.context_parallel((0, 1)), attention="heads"),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.usefixtures("losses_in_double")
def test_groups_that_share_a_packed_row_compute_what_one_device_does(
    packed_llama: tuple[nn.Module, Program], name: str
) -> None:
    model, program = packed_llama
    assert attentions(program.graph) == ["per sequence, causal"] * 2
    for length in (11, 6):
        same_in_group(program, model, PLANS[name], packed(length), limit=1e-10)
    lines = talk(device_graph(program, PLANS[name], 0))
    rings = [line for line in lines if line.startswith("ring_attention")]
    assert len(rings) == (2 if name == "ring" else 0)
    assert sum(line.startswith("sequence_attention") for line in lines) == 2 - len(rings)
    assert sum(line.startswith("sequence_places") for line in lines) == 1
