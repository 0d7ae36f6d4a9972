"""Steps of several contestants, timed in turns on all ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.kit.smallest import ROUNDS, least

Step = Callable[[], None]


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Run a model that returns its loss, or has it in what it returns."""
    output = model(**batch)
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]) -> Step:
    """Make one step of the ordinary loop."""

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    return step


def adamw(model: nn.Module, *, foreach: bool = True) -> torch.optim.Optimizer:
    """Make the optimizer that all contestants use."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)


def run_rounds(steps: Mapping[str, Step], *, rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Time the steps in turns; collective when there are ranks.

    Returns the seconds of each round until the last rank is done. Every round has an order of its own, the same on all
    ranks, so that nobody always runs after the same other.
    """
    for step in steps.values():
        for _ in range(least(warm_up, ROUNDS)):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(least(rounds, ROUNDS)):
        for name in order.sample(list(steps), len(steps)):
            seconds[name].append(slowest(timed(steps[name])))
    return seconds


def timed(step: Step) -> float:
    """Time one step that all ranks begin together."""
    barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def slowest(seconds: float) -> float:
    """Give the largest value of any rank."""
    if not dist.is_initialized():
        return seconds
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def barrier() -> None:
    """Wait for all ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()
