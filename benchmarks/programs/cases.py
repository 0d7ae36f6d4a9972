"""The models and clusters of the benchmark: those on which no plan without a program comes near HAP's program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.kit.models import Size, batch, gpt2, llama
from benchmarks.kit.nets import Autoencoder, BertMoe, Convolutions
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.graph.capture import capture
from hetu_fx.planner.count.graph_problem import GraphProblem, graph_problem_of
from hetu_fx.program.program import make_program

FAST, SLOW = Link(1e10, 1e-5), Link(1e8, 1e-4)
VOCABULARY = 8192


@dataclass(frozen=True, eq=False)
class Subject:
    """A model that returns its loss, or has it, and its example batch: a step of training."""

    name: str
    make: Callable[[], nn.Module]
    example: dict[str, Tensor]

    def problem(self) -> GraphProblem:
        """Capture the model, without weights, as what runs is rewritten."""
        with torch.device("meta"):
            model = self.make()
        return graph_problem_of(make_program(capture(model, self.example), frozenset()).analysed)


@dataclass(frozen=True, eq=False)
class Case:
    """A subject, and devices that are not there."""

    subject: Subject
    cluster: Cluster


def priced_cases(quick: bool) -> Iterator[Case]:
    """Yield what is priced, one of each model if there is little time."""
    three, four = [3e12, 2e12, 1e12], [2e13, 2e13, 1e13, 1e13]
    yield from _tiny_llamas(quick)
    yield Case(_images(12), Cluster.on_paper(three, intra=FAST))
    yield Case(_autoencoder(32, 12), Cluster.on_paper([3e11, 2e11, 1e11], intra=SLOW))
    bert = partial(BertMoe, 256, 2, 5, VOCABULARY)
    tokens = batch(12, 64, vocabulary=VOCABULARY)
    yield Case(Subject("bert-moe 2 x 256, 5 experts", bert, tokens), Cluster.on_paper(three, intra=FAST))
    words = batch(8, 128, vocabulary=50257)
    for layers in (2,) if quick else (2, 12):
        made = Subject(f"gpt2 {layers} x 768", partial(gpt2, 768, layers), words)
        yield Case(made, Cluster.on_paper(four, intra=FAST))


def _tiny_llamas(quick: bool) -> Iterator[Case]:
    """Yield Llamas on links on which almost all of a step is communication."""
    for size in (Size(64, 2, 12, 32),) if quick else (Size(64, 2, 12, 32), Size(128, 4, 12, 32)):
        for speeds in ([3e11, 2e11, 1e11], [2e11, 2e11, 1e11, 1e11]):
            yield Case(_llama(size), Cluster.on_paper(speeds, intra=SLOW))


def _llama(size: Size) -> Subject:
    return Subject(f"llama {size}", partial(llama, size), batch(size.rows, size.tokens))


def _images(rows: int) -> Subject:
    return Subject("convolutions", Convolutions, {"x": torch.randn(rows, 3, 32, 32)})


def _autoencoder(channels: int, rows: int) -> Subject:
    """Return what wants rows on both sides of one wide product, whose gradient is too large to add up."""
    images = {"x": torch.randn(rows, 3, 32, 32)}
    return Subject(f"autoencoder {channels}, {rows} rows", partial(Autoencoder, channels, 2048), images)


@dataclass(frozen=True, eq=False)
class Race:
    """A subject, and the emulated devices that it is run on: cores of each, and Mbit/s of their links if limited."""

    name: str
    subject: Subject
    speeds: tuple[float, ...]
    link_megabits: int | None = None


THREE, FOUR = (0.72, 0.48, 0.24), (0.48, 0.48, 0.24, 0.24)  # as the devices on paper; some of 2 cores is left free
LINK = 400


def races(quick: bool) -> Iterator[Race]:
    """Yield what is measured."""
    yield Race("convolutions", _images(48), THREE)
    wide = _autoencoder(64, 48)
    yield Race("autoencoder on 3", wide, THREE, LINK)
    yield Race("autoencoder on 4", wide, FOUR, LINK)
    yield Race("factors", _autoencoder(32, 24), THREE, LINK)
    bert = Subject("bert-moe", partial(BertMoe, 128, 2, 5, 2048), batch(12, 64, vocabulary=2048))
    yield Race("bert-moe", bert, THREE)
    words = Subject("gpt2", partial(gpt2, 256, 2, vocabulary=VOCABULARY), batch(12, 64, vocabulary=VOCABULARY))
    yield Race("gpt2", words, FOUR)
    tiny = _llama(Size(64, 2, 12, 32))
    yield Race("llama", tiny, THREE)
    if not quick:
        yield Race("convolutions, links", _images(96), THREE, 1000)
        yield Race("gpt2, links", words, FOUR, 1000)
        yield Race("llama on 4", tiny, FOUR)
