"""Problems of captured models, against sizes worked out by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph
from hetu_fx.planner.search.hap.adapter import problem_of
from hetu_fx.planner.search.hap.search import search
from hetu_fx.planner.search.hap.to_plan import translations
from hetu_fx.transforms.layouts.analysed_graph import Analyse
from tests.model_zoo import captured
from tests.planner.search.hap.released import of_bandwidths

UNEQUAL = Cluster.on_paper([2e12, 1e12], intra=Link(1e10, 1e-6))


class Attention(nn.Module):
    """Heads of a fused projection, a residual, a feed-forward."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(4, 64) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


@functools.cache
def stack(layers: int = 3) -> Graph:
    return capture(Stack(layers), {"x": torch.randn(8, 16, 64)}, loss_fn=lambda out, **batch: out)


def test_tensors_have_the_factors_of_the_models_dims() -> None:
    problem = problem_of(Analyse()(stack()))
    weight = problem.by_name["layers.0.qkv.weight"]
    assert (weight.shape, weight.origin, weight.kind) == ((3, 4, 16, 64), (0, 0, 0, 1), "parameter")
    [x] = [tensor for tensor in problem.tensors if tensor.kind == "input"]
    assert (x.shape, x.row_dim, x.bytes, x.has_gradient) == ((8, 16, 64), 0, 4 * 8 * 16 * 64, False)


def test_views_are_no_ops_and_products_count_their_flops() -> None:
    problem = problem_of(Analyse()(stack()))
    names = " ".join(op.name for op in problem.ops)
    assert "transpose" not in names
    assert "view" not in names
    [product] = [op for op in problem.ops if "layers.0.up.weight" in op.reads]
    flops = 2 * 8 * 16 * 64 * 256
    assert product.flops == flops
    assert problem.all_flops(product) == 3 * flops
    first = next(op for op in problem.ops if "layers.0.qkv.weight" in op.reads)
    assert problem.all_flops(first) == 2 * first.flops  # the batch has no gradient


def test_a_larger_batch_scales_rows_and_work() -> None:
    one, two = (problem_of(Analyse()(stack()), rows=rows) for rows in (8, 16))
    assert [op.flops * 2 for op in one.ops[:5]] == [op.flops for op in two.ops[:5]]
    assert {t.shape[t.row_dim] for t in two.tensors if t.row_dim is not None} == {16}


def test_equal_layers_are_searched_once() -> None:
    problem = problem_of(Analyse()(stack(6)))
    assert len(problem.blocks) == 6
    once, all_of_them = (search(problem, UNEQUAL, blocks_once=once) for once in (True, False))
    assert once.seconds == pytest.approx(all_of_them.seconds, rel=1e-9)
    assert [step.op.name for step in once.program.steps] == [op.name for op in problem.ops]


def test_heads_and_feed_forward_are_cut_for_few_rows_and_rows_where_there_are_many() -> None:
    equally_fast = of_bandwidths(1e8, 1e8, 1e8, 1e8)
    held = []
    for rows in (2, 4096):
        result = search(
            problem_of(Analyse()(stack()), rows=rows), Cluster.on_paper([2e9, 1e9]), collectives=equally_fast
        )
        held.append([str(result.layouts[f"layers.1.{name}.weight"]) for name in ("qkv", "up")])
    assert held == [["split 1", "split 0"], ["copy", "copy"]]  # by heads: the second factor of the fused dim


def test_parts_of_the_model_may_have_ratios_of_their_own() -> None:
    problem = problem_of(Analyse()(stack()), segment_per_part=True)
    assert {op.segment for op in problem.ops} == {1, 2}
    assert search(problem, UNEQUAL).seconds <= search(problem.in_one_segment(), UNEQUAL).seconds * (1 + 1e-6)


def test_the_plan_of_a_captured_model_names_parameters_of_the_model() -> None:
    problem = problem_of(Analyse()(stack()))
    result = search(problem, UNEQUAL)
    translation = translations(problem, result, UNEQUAL)[0]
    parameters = {tensor.name for tensor in problem.tensors if tensor.kind == "parameter"}
    assert {name for name, _ in translation.plan.split} <= parameters
    translation.plan.check(num_blocks=3, world_size=2)
    assert translation.loss_seconds >= -1e-9


def test_a_graph_without_parameters_is_refused() -> None:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sum()

    graph = capture(Nothing(), {"x": torch.randn(4, 4)}, loss_fn=lambda out, **batch: out)
    with pytest.raises(PlanError, match="no value of the graph depends on a parameter"):
        problem_of(Analyse()(graph))


@pytest.mark.parametrize("name", ["bert", "conv", "gpt2", "vit"])
def test_models_of_the_zoo_have_programs_no_slower_than_their_plans(name: str) -> None:
    problem = problem_of(Analyse()(captured(name)[1]))
    result = search(problem, UNEQUAL)
    assert translations(problem, result, UNEQUAL)[0].loss_seconds >= -1e-6 * result.seconds
