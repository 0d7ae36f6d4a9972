"""Hydraulis' strategies: pipelines of unlike groups and depths, each for sequences up to a length of its own.

The pool of its case study (Llama 32B on 64 A800; `benchmarks.cases.published_hydraulis`), with as many ranks as
published and a tenth of the blocks, trains on batches of mixed lengths: those of `benchmarks.ladder_hydraulis`, and
what pipelines hold, over 512. Each strategy runs two batches that it holds; then one training changes between three of
them, a batch for each. On one device every sequence has a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.published_hydraulis import POOL
from benchmarks.ladder_hydraulis import batch
from benchmarks.planted.worlds import VOCABULARY, Net
from benchmarks.traces.trace import Named, Trace
from hetu_fx.batches.packing import IGNORED, Filling, fill_rows
from hetu_fx.planner.dispatch.scheme_costs import Scheme, SequenceBatch, Strategy
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.oracles.hydraulis_choice import choose

PART = 512  # of the published lengths
SEQUENCES = 40  # of a batch
WIDTH, HEADS = 32, 16
BLOCKS = 6  # that the stages of each strategy have equal shares of
IN_TURN, CHOSEN = "three of the pool in turn", POOL[::3]


class Reader(Net):
    """A language model of rows in which several sequences may stand; `position_ids` restart in each."""

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        assert position_ids is not None, "rows have them; sequences get them where they become rows"
        number = (position_ids == 0).cumsum(1)
        mask = (number[:, :, None] == number[:, None]) & (position_ids[:, :, None] >= position_ids[:, None])
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, mask[:, None])
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@dataclass(frozen=True)
class MixedLengths(Trace):
    """Plans that train on batches of mixed lengths, one after another; `steps` are the lengths of each batch."""

    steps: tuple[tuple[int, ...], ...] = ()

    def model(self) -> nn.Module:
        """Make the model, always with the same numbers."""
        torch.manual_seed(5)
        return Reader(self.blocks, self.width, self.heads).double()

    def batches(self) -> list[Mapping[str, Any]]:
        """Make the batches: nested tensors."""
        nested = (torch.nested.nested_tensor(texts, layout=torch.jagged) for texts in self._texts())
        return [{"input_ids": tensor, "labels": tensor.clone()} for tensor in nested]

    def rows(self) -> list[Mapping[str, Any]]:
        """Make the batches as one device takes them: a row for each sequence, filled up."""
        filling = Filling({"labels": IGNORED}, "position_ids")
        return [
            fill_rows(dict.fromkeys(("input_ids", "labels"), texts), [(i,) for i in range(len(texts))], most, filling)
            for texts, most in zip(self._texts(), map(max, self.steps), strict=True)
        ]

    def _texts(self) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(6)
        return [[torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths] for lengths in self.steps]


def hydraulis() -> Iterator[Named]:
    """Yield the strategies of the pool, each alone, and a training that changes between some of them."""
    for strategy in POOL:
        yield Named("Hydraulis", str(strategy), partial(_alone, strategy))
    yield Named("Hydraulis", IN_TURN, _in_turn)


def _alone(strategy: Strategy) -> MixedLengths:
    held = [_held(strategy, seed) for seed in range(2)]
    seconds = sum(choose((strategy,), SequenceBatch(lengths)).seconds for lengths in held) / len(held)
    plans = (_plan(strategy),)
    return MixedLengths("Hydraulis", str(strategy), plans, BLOCKS, WIDTH, HEADS, seconds, steps=_scaled(held))


def _in_turn() -> MixedLengths:
    plans = tuple(replace(_plan(strategy), name=str(strategy)) for strategy in CHOSEN)
    held = [_held(strategy, seed) for seed, strategy in enumerate(CHOSEN)]
    return MixedLengths("Hydraulis", IN_TURN, plans, BLOCKS, WIDTH, HEADS, steps=_scaled(held))


def _held(strategy: Strategy, seed: int) -> tuple[int, ...]:
    """Return the lengths of a batch whose longest sequence a strategy takes."""
    return tuple(min(length, strategy.max_length) for length in batch(seed).lengths[:SEQUENCES])


def _scaled(batches: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(max(2, length // PART) for length in lengths) for lengths in batches)


def _plan(strategy: Strategy) -> Plan:
    """Return a strategy as a plan on devices in order."""
    starts = [sum(scheme.devices for scheme in strategy.pipelines[:i]) for i in range(len(strategy.pipelines))]
    pairs = zip(strategy.pipelines, starts, strict=True)
    pipelines = tuple(_pipeline(scheme, start) for scheme, start in pairs)
    return Plan(pipelines, max_length=max(pipeline.max_length or 0 for pipeline in pipelines))


def _pipeline(scheme: Scheme, start: int) -> Pipeline:
    firsts = range(start, start + scheme.devices, scheme.group)
    stages = tuple(Stage(tuple(range(first, first + scheme.group)), blocks=BLOCKS // scheme.stages) for first in firsts)
    return Pipeline(stages, share=scheme.devices, max_length=max(1, scheme.max_length // PART))
