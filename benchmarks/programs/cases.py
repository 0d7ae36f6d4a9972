"""The models and clusters of the benchmark: those on which no plan without a program comes near HAP's program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kit.models import Size, batch, gpt2, llama
from benchmarks.kit.nets import BertMoe, Convolutions
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.graph.capture import capture
from hetu_fx.planner.count.graph_problem import GraphProblem, problem_of
from hetu_fx.program.program import make_program

FAST, SLOW = Link(1e10, 1e-5), Link(1e8, 1e-4)
VOCABULARY = 8192


def mean_square(output: Tensor, **given: Tensor) -> Tensor:
    """Return a loss for a model that has none."""
    return output.pow(2).mean()


@dataclass(frozen=True, eq=False)
class Case:
    """A model, its example batch, the loss if it has none itself, and the devices' FLOPs per second and link."""

    name: str
    make: Callable[[], nn.Module]
    example: dict[str, Tensor]
    cluster: Cluster
    loss_fn: Any = None

    def problem(self) -> GraphProblem:
        """Capture the model, without weights, as what runs is rewritten."""
        with torch.device("meta"):
            model = self.make()
        graph = capture(model, self.example, loss_fn=self.loss_fn)
        return problem_of(make_program(graph, frozenset()).analysed)


def cases(quick: bool) -> Iterator[Case]:
    """Yield the cases, one of each model if there is little time."""
    three, four = [3e12, 2e12, 1e12], [2e13, 2e13, 1e13, 1e13]
    yield from _tiny_llamas(quick)
    images = {"x": torch.randn(12, 3, 32, 32)}
    yield Case("convolutions", Convolutions, images, Cluster.on_paper(three, intra=FAST), mean_square)
    tokens = batch(12, 64, vocabulary=VOCABULARY)
    yield Case("bert-moe 2 x 256, 5 experts", _bert, tokens, Cluster.on_paper(three, intra=FAST))
    words = batch(8, 128, vocabulary=50257)
    for layers in (2,) if quick else (2, 12):
        made = _gpt2(layers)
        yield Case(f"gpt2 {layers} x 768", made, words, Cluster.on_paper(four, intra=FAST))


def _tiny_llamas(quick: bool) -> Iterator[Case]:
    """Yield Llamas on links on which almost all of a step is communication."""
    for size in (Size(64, 2, 12, 32),) if quick else (Size(64, 2, 12, 32), Size(128, 4, 12, 32)):
        for speeds in ([3e11, 2e11, 1e11], [2e11, 2e11, 1e11, 1e11]):
            cluster = Cluster.on_paper(speeds, intra=SLOW)
            yield Case(f"llama {size}", _llama(size), batch(size.rows, size.tokens), cluster)


def _llama(size: Size) -> Callable[[], nn.Module]:
    return lambda: llama(size)


def _gpt2(layers: int) -> Callable[[], nn.Module]:
    return lambda: gpt2(768, layers)


def _bert() -> nn.Module:
    return BertMoe(256, 2, 5, VOCABULARY)
