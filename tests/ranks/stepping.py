"""A small model whose ranks watch each other, for tests of ranks that leave, stop, cannot be reached, or go on long."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hetu_fx

WORLD = 2
BOUND = 5.0
"""Seconds that a rank waits for the others before it looks what has become of them."""


class Scaled(nn.Module):
    """Its graph fixes `factor`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.factor


def watched(*plans: hetu_fx.Plan, wait_seconds: float = BOUND) -> tuple[Any, Any]:
    """Return a model of `WORLD` ranks, or of plans, and the input that it takes, once the job's variables are set."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(2, 6, 16)
    model = hetu_fx.auto_parallelize(
        model,
        (x,),
        plan=plans or hetu_fx.Plan.data_parallel(range(WORLD)),
        loss_fn=lambda output, x: output.pow(2).mean(),
        options=hetu_fx.Options(wait_seconds=wait_seconds),
    )
    return model, x
