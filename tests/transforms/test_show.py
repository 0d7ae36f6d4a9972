"""A graph reads well as text."""

from __future__ import annotations

import re

import torch
from torch import nn

from hetu_fx.graph import meta
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import LeafKind, OutputKind
from hetu_fx.transforms.show import show


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x + torch.arange(x.shape[0]).unsqueeze(1)).pow(2).mean(), "x": x}


GOLDEN = """\
graph in training, dynamic batch, 2 blocks
  layers_0_lin_weight: f32[6, 6] = parameter layers.0.lin.weight
  layers_1_lin_weight: f32[6, 6] = parameter layers.1.lin.weight
  x: f32[batch, 6] = input x
  sym_size_int: batch = sym_size.int(x, 0)  # unknown line
  -- block 0
  linear: f32[batch, 6] = linear(x, layers_0_lin_weight)  # test_show.py:LINE
  add: f32[batch, 6] = add.Tensor(x, linear)  # test_show.py:LINE
  -- block 1
  linear_1: f32[batch, 6] = linear(add, layers_1_lin_weight)  # test_show.py:LINE
  add_1: f32[batch, 6] = add.Tensor(add, linear_1)  # test_show.py:LINE
  --
  arange: i64[batch] = arange(sym_size_int, device=cpu)  # test_show.py:LINE
  unsqueeze: i64[batch, 1] = unsqueeze(arange, 1)  # test_show.py:LINE
  add_2: f32[batch, 6] = add.Tensor(add_1, unsqueeze)  # test_show.py:LINE
  pow_1: f32[batch, 6] = pow.Tensor_Scalar(add_2, 2)  # test_show.py:LINE
  mean: f32[] = mean(pow_1)  # test_show.py:LINE
  return loss loss = mean
  return value x = add_1"""


def test_text_of_a_small_model() -> None:
    text = show(capture(Model(), (torch.randn(4, 6),)))
    text = re.sub(r"py:\d+", "py:LINE", text).replace("input_0", "x").replace("input 0", "input x")
    assert re.sub(r"sym_size_int\w*", "sym_size_int", text) == GOLDEN


def test_clones_share_no_node_and_know_the_same() -> None:
    graph = capture(Model(), (torch.randn(4, 6),))
    clone = graph.clone()
    assert not set(clone.graph.nodes) & set(graph.graph.nodes)
    assert show(clone) == show(graph)


def test_select_keeps_what_the_kept_outputs_need() -> None:
    graph = capture(Model(), (torch.randn(4, 6),))
    values = graph.select(lambda leaf: leaf.kind is OutputKind.VALUE)
    assert [leaf.name for leaf in values.outputs] == ["x"]
    assert len(values.graph.nodes) == len(graph.graph.nodes) - 6
    assert values.loss is None


def test_positions_follow_the_data() -> None:
    graph = capture(Model(), (torch.randn(4, 6),))
    by_name = {node.name: node for node in graph.graph.nodes}
    assert graph.position(by_name["add_1"]) == 1
    assert graph.position(by_name["arange"]) == -1
    assert graph.position(by_name["mean"]) == 1


def test_what_depends_on_the_batch_is_known() -> None:
    graph = capture(Model(), (torch.randn(4, 6),))
    assert [meta.depends_on_batch(leaf.node, graph) for leaf in graph.leaves] == [False, False, True]
    assert graph.leaf_of(graph.leaves[2].node).kind is LeafKind.INPUT
