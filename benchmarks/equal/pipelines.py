"""Two equal processes as two stages: schedules of ours beside torch.distributed.pipelining's, whole and in chunks.

Every process has one thread and a core of its own. All train the same Llama by the same rows, in as many micro-batches,
with the same optimizer. By the textbook a step of m micro-batches on p equal stages takes m + p - 1 times a
micro-batch's under 1F1B, m + (p - 1) / v where stages are in v chunks (interleaved), m + (p - 1) / 3 under zero bubble
(ZB-H1) and m + (p - 1) / 3v under both, as long as all of a backward's work can be cut in halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.profiler import record_function

import hetu_fx
from benchmarks.equal.contest import Against, Contest, Job, kept_by, marked_step
from benchmarks.kit.contest import adamw
from benchmarks.kit.models import Size, batch, llama
from hetu_fx.plans.plan import Pipeline, Plan, Schedule, Stage

SIZE = Size(width=256, layers=4, rows=16, tokens=128)
MICRO_BATCHES = 4, 8
NUM_CHUNKS = 2
TORCH = "torch, 1F1B"
TORCH_CHUNKS: Mapping[str, Callable[..., Any]] = {
    "torch, interleaved 1F1B": ScheduleInterleaved1F1B,
    "torch, interleaved zero bubble": ScheduleInterleavedZeroBubble,
}
THEIRS = {TORCH: Schedule1F1B, **TORCH_CHUNKS}
WHOLE: Mapping[str, Schedule] = {"hetu_fx, 1F1B": "1f1b", "hetu_fx, zero bubble": "zero-bubble"}
CHUNKS: Mapping[str, Schedule] = {
    "hetu_fx, interleaved": "interleaved",
    "hetu_fx, interleaved zero bubble": "zero-bubble",
}
TORCH_BAR = 0.95
WORLD = 2


def contest(count: int) -> Contest:
    """Make the contest of so many micro-batches."""
    whole = batch(SIZE.rows, SIZE.tokens)
    ours = {name: partial(our_job, whole, schedule, count, 1) for name, schedule in WHOLE.items()}
    ours |= {name: partial(our_job, whole, schedule, count, NUM_CHUNKS) for name, schedule in CHUNKS.items()}
    theirs = {name: partial(torch_job, whole, name, count) for name in THEIRS}
    in_chunks = [Against(tuple(CHUNKS), name, TORCH_BAR) for name in TORCH_CHUNKS]
    return Contest({**theirs, **ours}, [Against(tuple(WHOLE), TORCH, TORCH_BAR), *in_chunks])


def our_job(whole: Mapping[str, Tensor], schedule: Schedule, count: int, chunks: int) -> Job:
    """Train by hetu_fx under a schedule; its backward runs in forward."""
    plain, rank = llama(SIZE), dist.get_rank()
    optimizer = adamw(plain)
    own = {name: value.chunk(WORLD)[rank] for name, value in whole.items()}
    plan = Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=count),), schedule=schedule, chunks=chunks)
    model = hetu_fx.auto_parallelize(plain, own, plan=plan, optimizer=optimizer)
    return Job(marked_step(model, optimizer, own), partial(kept_by, model, optimizer))


class Part(nn.Module):
    """One of several parts of a Llama, as a user of torch.distributed.pipelining writes it."""

    def __init__(self, model: nn.Module, number: int, count: int) -> None:
        super().__init__()
        size = SIZE.layers // count
        self.layers = model.model.layers[number * size : (number + 1) * size]
        self.rotary = model.model.rotary_emb
        self.embed = model.model.embed_tokens if number == 0 else nn.Identity()
        self.head = nn.Sequential(model.model.norm, model.lm_head) if number == count - 1 else nn.Identity()

    def forward(self, given: Tensor) -> Tensor:
        """Return hidden states, or scores."""
        hidden = self.embed(given)
        places = self.rotary(hidden, torch.arange(hidden.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=places)
        made: Tensor = self.head(hidden)
        return made


def next_tokens_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a causal language model."""
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def torch_job(whole: Mapping[str, Tensor], name: str, count: int) -> Job:
    """Train by torch.distributed.pipelining; its backward runs with its forward, too."""
    rank, parts = dist.get_rank(), WORLD * (1 if name == TORCH else NUM_CHUNKS)
    model = llama(SIZE)
    held = nn.ModuleList(Part(model, number, parts) for number in range(rank, parts, WORLD))
    optimizer = adamw(held)
    stages = [PipelineStage(part, rank + i * WORLD, parts, torch.device("cpu")) for i, part in enumerate(held)]
    schedule = THEIRS[name](stages if len(stages) > 1 else stages[0], count, loss_fn=next_tokens_loss)
    given = (whole["input_ids"],) if rank == 0 else ()
    target = {"target": whole["labels"]} if rank == WORLD - 1 else {}

    def step() -> None:
        optimizer.zero_grad()
        with record_function("forward"):
            schedule.step(*given, **target)
        with record_function("backward"):
            pass
        with record_function("optimizer"):
            optimizer.step()

    return Job(step, partial(kept_by, held, optimizer))
