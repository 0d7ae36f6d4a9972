"""A mask that says no more than causal, or nothing, is not made; any other stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hetu_fx.graph.calls import argument
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.simplify import ATTENTION
from tests.graph.compare import assert_same_as_eager

Mask = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """One attention, its keys and values of half as many heads repeated for the queries, under a mask."""

    def __init__(self, mask: Mask, repeats: int = 2) -> None:
        super().__init__()
        self.mask, self.repeats = mask, repeats
        self.query, self.other = nn.Linear(8, 8), nn.Linear(8, 8 // repeats)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query = self.query(x).view(rows, length, -1, 2).transpose(1, 2)
        other = self.other(x).view(rows, length, -1, 2).transpose(1, 2)
        key, value = self.repeated(other), self.repeated(other.sin())
        return scaled_dot_product_attention(query, key, value, self.mask(x)).pow(2).sum()

    def repeated(self, x: Tensor) -> Tensor:
        rows, heads, length, width = x.shape
        many = x[:, :, None].expand(rows, heads, self.repeats, length, width)
        return many.reshape(rows, heads * self.repeats, length, width)


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def causal(x: Tensor) -> Tensor:
    return places(x)[None, None, None] <= places(x)[:, None]


def full(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)


def window(x: Tensor) -> Tensor:
    return causal(x) & (places(x)[:, None] - places(x)[None] < 2)


def ahead(x: Tensor) -> Tensor:
    return places(x)[None] <= places(x)[:, None] + 1


def of_values(x: Tensor) -> Tensor:
    return causal(x) | (x[:, None, None, :, 0] > 0)


def attention_of(graph: Graph) -> dict[str, object]:
    (node,) = graph.graph.find_nodes(op="call_function", target=ATTENTION)
    return {name: argument(node, name) for name in ("attn_mask", "is_causal", "enable_gqa")}


@pytest.mark.parametrize("mask", [causal, full])
def test_a_causal_or_empty_mask_is_said_and_not_made(mask: Mask) -> None:
    model, batch = Attention(mask), {"x": torch.randn(3, 5, 8)}
    graph = capture(model, batch)
    assert attention_of(graph) == {"attn_mask": None, "is_causal": mask is causal, "enable_gqa": True}
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.arange.default)
    assert_same_as_eager(model, graph, {"x": torch.randn(4, 7, 8)}, 1e-6)


def test_heads_that_are_not_repeated_need_no_grouping() -> None:
    graph = capture(Attention(causal, repeats=1), {"x": torch.randn(3, 5, 8)})
    assert attention_of(graph) == {"attn_mask": None, "is_causal": True, "enable_gqa": False}


@pytest.mark.parametrize("mask", [window, ahead, of_values])
def test_any_other_mask_stays(mask: Mask) -> None:
    model, batch = Attention(mask), {"x": torch.randn(3, 5, 8)}
    graph = capture(model, batch)
    assert attention_of(graph)["attn_mask"] is not None
    assert not attention_of(graph)["enable_gqa"]
    assert_same_as_eager(model, graph, {"x": torch.randn(4, 7, 8)}, 1e-6)
