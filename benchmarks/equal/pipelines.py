"""Two equal processes as two stages: schedules of ours beside torch.distributed.pipelining's 1F1B.

Every process has one thread and a core of its own. All train the same Llama by the same rows, in as many micro-batches,
with the same optimizer. By the textbook a step of m micro-batches on p equal stages takes m + p - 1 times a
micro-batch's under 1F1B, and m + (p - 1) / 3 under zero bubble (ZB-H1), as long as all of a backward's work can be cut
in halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import hetu_fx
from benchmarks.kit.contest import Step, adamw, run_rounds, train_step
from benchmarks.kit.fleet import in_fleet, run_workers, worker_parser, write_result
from benchmarks.kit.models import Size, batch, llama
from benchmarks.kit.report import Bar, Row, finish, median_ratio
from hetu_fx.emulate.emulate import EmulateSpec
from hetu_fx.plans.plan import Pipeline, Plan, Schedule, Stage

SIZE = Size(width=256, layers=4, rows=16, tokens=128)
MICRO_BATCHES = 4, 8
TORCH = "torch, 1F1B"
OURS: Mapping[str, Schedule] = {"hetu_fx, 1F1B": "1f1b", "hetu_fx, zero bubble": "zero-bubble"}
TORCH_BAR = 0.95
WORLD = 2


def main() -> int:
    """Run the contest and judge it."""
    options = worker_parser("equal", "Schedules of two stages beside torch.distributed.pipelining.").parse_args()
    if options.worker is not None:
        return work(options.worker, rounds=5 if options.quick else 15)
    spec = EmulateSpec(speeds=(1.0,) * WORLD)
    given = ["--quick"] * options.quick
    found = run_workers("equal", given, spec, timeout_seconds=900, limit="affinity")
    bars = [
        Bar(f"{count} micro-batches: best of ours over torch", best(seconds), TORCH_BAR, at_least=False)
        for count, seconds in found.items()
    ]
    return finish("equal", bars, [row for count, seconds in found.items() for row in rows_of(count, seconds)])


def best(seconds: Mapping[str, list[float]]) -> float:
    """Return the time of the best of our schedules over torch's."""
    return min(median_ratio(seconds[name], seconds[TORCH]) for name in OURS)


def rows_of(count: str, seconds: Mapping[str, list[float]]) -> list[Row]:
    """Make the lines of one number of micro-batches."""
    return [
        {
            "micro-batches": count,
            "who": name,
            "seconds a step": sorted(own)[len(own) // 2],
            "over torch": median_ratio(own, seconds[TORCH]),
        }
        for name, own in seconds.items()
    ]


def work(result: Path, *, rounds: int) -> int:
    """Be one stage."""
    with in_fleet():
        whole = batch(SIZE.rows, SIZE.tokens)
        found = {str(count): run_rounds(contestants(whole, count), rounds=rounds) for count in MICRO_BATCHES}
        write_result(result, found)
    return 0


def contestants(whole: Mapping[str, Tensor], count: int) -> dict[str, Step]:
    """Make all steps of so many micro-batches."""
    ours = {name: our_step(whole, schedule, count) for name, schedule in OURS.items()}
    return ours | {TORCH: torch_step(whole, count)}


def our_step(whole: Mapping[str, Tensor], schedule: Schedule, count: int) -> Step:
    """Make our step under a schedule."""
    model, rank = llama(SIZE), dist.get_rank()
    optimizer = adamw(model)
    own = {name: value.chunk(WORLD)[rank] for name, value in whole.items()}
    plan = Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=count),), schedule=schedule)
    return train_step(hetu_fx.auto_parallelize(model, own, plan=plan, optimizer=optimizer), optimizer, own)


class Half(nn.Module):
    """One of two stages of a Llama, as a user of torch.distributed.pipelining writes it."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        half = SIZE.layers // WORLD
        self.layers = model.model.layers[rank * half : (rank + 1) * half]
        self.rotary = model.model.rotary_emb
        self.embed = model.model.embed_tokens if rank == 0 else nn.Identity()
        self.head = nn.Sequential(model.model.norm, model.lm_head) if rank == WORLD - 1 else nn.Identity()

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


def torch_step(whole: Mapping[str, Tensor], count: int) -> Step:
    """Make the step of torch.distributed.pipelining."""
    rank = dist.get_rank()
    half = Half(llama(SIZE), rank)
    optimizer = adamw(half)
    stage = PipelineStage(half, rank, WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, count, loss_fn=next_tokens_loss)
    given = (whole["input_ids"],) if rank == 0 else ()
    target = {"target": whole["labels"]} if rank == WORLD - 1 else {}

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*given, **target)
        optimizer.step()

    return step
