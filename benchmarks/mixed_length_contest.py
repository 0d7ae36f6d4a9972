"""Who takes part in the contest on sequences of mixed lengths: hetu_fx under a policy, and DDP."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hetu_fx
from benchmarks.contest import adamw
from benchmarks.mixed_length_plans import LONGEST, plans_of
from benchmarks.models import Size, llama
from hetu_fx.demo_data import library_pieces
from hetu_fx.nested_batches import nested_batch
from hetu_fx.packed_rows import IGNORED, Filling, filled
from hetu_fx.planner.hydraulis.assignment import Assignment, Candidate, Request
from hetu_fx.planner.hydraulis.policies import Hydraulis, SequencePolicy
from hetu_fx.sequences import Pieces, TokenBudgetSampler
from hetu_fx.topology import Cluster

Texts = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Scale:
    """How large the contest is: the model, tokens of a batch, tokens of the rows that a device holds."""

    size: Size
    tokens: int
    held: int


def corpus(scale: Scale, count: int) -> list[list[torch.Tensor]]:
    """Return batches of exactly `scale.tokens` tokens, the same on every rank."""
    pieces = library_pieces()
    data = Pieces([torch.frombuffer(bytearray(piece), dtype=torch.uint8).long() for piece in pieces])
    sampler = TokenBudgetSampler([len(piece) for piece in pieces], scale.tokens, longest=LONGEST * scale.held)
    return [[data[piece] for piece in batch] for _, batch in zip(range(count), sampler, strict=False)]


@dataclass(frozen=True, slots=True)
class Among:
    """A policy that has some of the variants only."""

    names: tuple[str, ...]
    policy: SequencePolicy

    def __call__(self, candidates: Sequence[Candidate], request: Request, /) -> tuple[Assignment, ...]:
        """Return what the policy says of them."""
        return self.policy([one for one in candidates if one.name in self.names], request)


@dataclass(frozen=True, slots=True)
class Took:
    """What a round took on this rank: in its own ops, on the processor, and as expected, in seconds; and what ran."""

    computing: float
    on_processor: float
    predicted: float
    variants: str


class Trained:
    """A model of hetu_fx with some variants, made ready to train under different policies."""

    def __init__(self, scale: Scale, cluster: Cluster, names: Sequence[str]) -> None:
        plain = llama(scale.size)
        self.optimizer = adamw(plain)
        ids = torch.ones(3, scale.held, dtype=torch.int64)
        example = {"input_ids": ids, "labels": ids.clone(), "position_ids": ids.clone(), "use_cache": False}
        plans = plans_of(names, scale.size.layers, scale.held)
        self.model: Any = hetu_fx.auto_parallelize(
            plain, example, plan=plans, cluster=cluster, optimizer=self.optimizer, data="global"
        )
        for name in names:  # so that all graphs are made
            self.train(Among((name,), Hydraulis()), [[ids[0, : LONGEST * 16], *[ids[0, :32]] * 7]])

    def train(self, policy: SequencePolicy, batches: Sequence[Texts]) -> Took:
        """Train on batches, each planned while the one before runs."""
        hetu, start = self.model.hetu, time.process_time()
        hetu.sequences.policy = policy
        computing, predicted, variants = 0.0, 0.0, []
        for batch in hetu.ahead([nested_batch(texts, use_cache=False) for texts in batches]):
            self.optimizer.zero_grad()
            self.model(**batch).loss.backward()
            self.optimizer.step()
            computing += hetu.stats["compute_seconds"]
            predicted += hetu.stats["planning"].predicted_seconds
            variants.append(hetu.current)
        return Took(computing, time.process_time() - start, predicted, ", ".join(variants))


class Grouped:
    """DDP: sequences of like lengths side by side, padded, in micro-batches that a device holds.

    A sequence that no device holds runs alone all the same, which is more than the devices of the others may do.
    """

    def __init__(self, scale: Scale) -> None:
        self.held = scale.held
        self.model = DistributedDataParallel(llama(scale.size))
        self.optimizer = adamw(self.model)

    def train(self, batches: Sequence[Texts]) -> Took:
        """Train on batches."""
        start = time.process_time()
        for batch in batches:
            self.optimizer.zero_grad()
            self._train(batch)
            self.optimizer.step()
        used = time.process_time() - start
        return Took(used, used, 0.0, "")

    def _train(self, batch: Texts) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        predicted = sum(len(text) - 1 for text in batch) / world  # DDP takes the mean over ranks
        groups = self._groups(sorted(batch, key=len, reverse=True)[rank::world])
        for number, group in enumerate(groups):
            rows = _padded(group)
            valid = int((rows["labels"][:, 1:] != IGNORED).sum())
            with self.model.no_sync() if number + 1 < len(groups) else nullcontext():
                (self.model(**rows, use_cache=False).loss * (valid / predicted)).backward()

    def _groups(self, own: Texts) -> list[list[torch.Tensor]]:
        groups: list[list[torch.Tensor]] = []
        for text in own:  # the longest of a group comes first, and pads the others
            if not groups or (len(groups[-1]) + 1) * len(groups[-1][0]) > max(self.held, len(groups[-1][0])):
                groups.append([])
            groups[-1].append(text)
        return groups


def _padded(group: Texts) -> Mapping[str, torch.Tensor]:
    rows = [(index,) for index in range(len(group))]
    return filled({"input_ids": group, "labels": group}, rows, len(group[0]), Filling({"labels": IGNORED}))
