"""Who takes part in the contest on sequences of mixed lengths: hetu_fx under a policy, batch after batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import hetu_fx
from benchmarks.kit.contest import adamw
from benchmarks.kit.models import Size, llama
from benchmarks.lengths.plans import plans_of
from examples.demo.data import library_pieces
from hetu_fx.batches.sampler import Pieces, TokenBudgetSampler, nested_batch
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.dispatch.assignment import Assignment, EligibleVariant, Request
from hetu_fx.planner.dispatch.policies import Hydraulis, SequencePolicy

Texts = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Scale:
    """How large the contest is: the model, tokens of a batch, of what a device holds, and of the longest sequence."""

    size: Size
    tokens: int
    held: int
    longest: int


def corpus(scale: Scale, count: int) -> list[list[torch.Tensor]]:
    """Return batches of exactly `scale.tokens` tokens, the same on every rank."""
    pieces = library_pieces()
    data = Pieces([torch.frombuffer(bytearray(piece), dtype=torch.uint8).long() for piece in pieces])
    sampler = TokenBudgetSampler([len(piece) for piece in pieces], scale.tokens, longest=scale.longest)
    return [[data[piece] for piece in batch] for _, batch in zip(range(count), sampler, strict=False)]


def sample_of(texts: Texts, every: int) -> list[torch.Tensor]:
    """Return every n-th sequence by length, from the longest, so that padding is as wide as for all."""
    return sorted(texts, key=len, reverse=True)[::every]


@dataclass(frozen=True, slots=True)
class Among:
    """A policy that has some of the variants only."""

    names: tuple[str, ...]
    policy: SequencePolicy

    def __call__(self, candidates: Sequence[EligibleVariant], request: Request, /) -> tuple[Assignment, ...]:
        """Return what the policy says of them."""
        return self.policy([one for one in candidates if one.name in self.names], request)


@dataclass(frozen=True, slots=True)
class Took:
    """What a batch took on this rank, and what ran.

    Seconds in its own ops, on the processor, as expected, of the device with most to compute, as expected, of planning,
    and of waiting for a plan; and its own seconds over those that were expected of this rank.
    """

    computing: float
    on_processor: float
    predicted: float = 0.0
    to_compute: float = 0.0
    planning: float = 0.0
    waited: float = 0.0
    variant: str = ""
    slowness: float = 0.0


class Trained:
    """A model of hetu_fx with some variants, made ready to train under different policies."""

    def __init__(self, scale: Scale, cluster: Cluster, names: Sequence[str]) -> None:
        plain = llama(scale.size)
        self.optimizer = adamw(plain)
        ids = torch.ones(3, scale.held, dtype=torch.int64)
        example = {"input_ids": ids, "labels": ids.clone(), "position_ids": ids.clone(), "use_cache": False}
        self.model: Any = hetu_fx.auto_parallelize(
            plain,
            example,
            plan=plans_of(names, scale.size.layers, scale.held),
            cluster=cluster,
            optimizer=self.optimizer,
            data="global",
        )
        self._cluster = cluster
        for name in names:  # so that all graphs are made
            Series(self, Among((name,), Hydraulis()), [[ids[0, :64], *[ids[0, :32]] * 7]]).train()

    def to_compute(self) -> Mapping[int, float]:
        """Return the seconds that each device was expected to compute for in the last step."""
        work = self.model.hetu._runtime.report.work
        found: Mapping[int, float] = work(self._cluster)
        return found


class Series:
    """Batches that a model trains on under a policy, each planned while those before it run."""

    def __init__(self, trained: Trained, policy: SequencePolicy, batches: Sequence[Texts]) -> None:
        self._trained, self._policy = trained, policy
        nested = [nested_batch(texts, use_cache=False) for texts in batches]
        self._batches: Iterator[Mapping[str, Any]] = trained.model.hetu.ahead(nested)

    def train(self) -> Took:
        """Train on the next batch."""
        model, optimizer = self._trained.model, self._trained.optimizer
        hetu, start = model.hetu, time.process_time()
        stats = hetu.stats["planning"]
        before = stats.seconds, stats.waited_seconds
        hetu.sequences.policy = self._policy
        batch = next(self._batches)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        computing, expected = hetu.stats["compute_seconds"], self._trained.to_compute()
        own = expected.get(dist.get_rank(), 0.0)
        return Took(
            computing,
            time.process_time() - start,
            stats.predicted_seconds,
            max(expected.values()),
            stats.seconds - before[0],
            stats.waited_seconds - before[1],
            hetu.current,
            computing / own if own else 1.0,
        )
