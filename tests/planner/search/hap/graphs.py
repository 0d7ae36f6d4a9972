"""Problems of captured nets, rewritten as those that run are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.graph.capture import capture
from hetu_fx.planner.count.graph_problem import GraphProblem, graph_problem_of
from hetu_fx.planner.search.hap.priced import deduce_plan, price_plan_run
from hetu_fx.planner.search.hap.synthesised_program import HapResult
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import make_program
from tests.planner.search.nets import Convolutions, Perceptron, images, mean_square

TWO_TO_ONE = Cluster.on_paper([2e10, 1e10], intra=Link(1e10, 1e-6))


def run_of_plan(problem: GraphProblem, plan: Plan, cluster: Cluster) -> HapResult:
    """Return the program that a plan runs."""
    return price_plan_run(problem, plan, deduce_plan(problem, plan, cluster), cluster)


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


def graph_problem(make: Callable[[], nn.Module], batch: dict[str, torch.Tensor], loss_fn: Any = None) -> GraphProblem:
    """Capture a model without weights."""
    with torch.device("meta"):
        model = make()
    return graph_problem_of(make_program(capture(model, batch, loss_fn=loss_fn), frozenset()).analysed)


@functools.cache
def perceptron() -> GraphProblem:
    """Return the problem of `Perceptron` on 6 rows."""
    return graph_problem(Perceptron, {"x": torch.randn(6, 24)}, mean_square)


@functools.cache
def convolutions() -> GraphProblem:
    """Return the problem of `Convolutions` on 6 rows."""
    return graph_problem(Convolutions, images(6), mean_square)


@functools.cache
def stack(layers: int = 3) -> GraphProblem:
    """Return the problem of blocks of attention and feed-forward."""
    return graph_problem(lambda: Stack(layers), {"x": torch.randn(8, 16, 64)}, mean_square)
