"""Nets without repeated blocks that searches are asked about, captured as the runtime captures them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.program.captures import Programs


class Convolutions(nn.Module):
    """Most work in front, most parameters behind."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(3, 16), (16, 32)]
        parts = [m for a, b in widths for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))]
        self.features = nn.Sequential(*parts)
        self.head = nn.Sequential(nn.Linear(32 * 16, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class Perceptron(nn.Module):
    """Three products, the second the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(24, 96), nn.Linear(96, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.relu(self.first(x)))))


def mean_square(output: Tensor, **batch: Tensor) -> Tensor:
    """Return a loss."""
    return output.pow(2).mean()


def images(rows: int) -> dict[str, Tensor]:
    """Make a batch for `Convolutions`."""
    return {"x": torch.randn(rows, 3, 16, 16)}


@functools.cache
def convolutions(rows: int = 18) -> CapturedProgram:
    """Capture `Convolutions`, once per process."""
    return CapturedProgram.of(Programs(Convolutions(), mean_square), images(rows))


def problem(cluster: Cluster, rows: int = 18, **options: Any) -> Problem:
    """Return what searches are asked about `Convolutions`."""
    program = convolutions(rows)
    costs = program.costs(rows)
    return Problem(Profile(costs), cluster, PlanOptions(**options), captured=program.at(costs))


UNEQUAL = Cluster.on_paper([2e10, 1e10], intra=Link(1e10, 1e-6))
