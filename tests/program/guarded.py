"""A model whose forward reads all kinds of things, and its programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.program.captures import Programs
from hetu_fx.program.program import Program

GLOBAL = {"shift": 0.0}
BATCH = {"x": torch.ones(4, 3)}


class Settings:
    """Settings of a class of their own."""

    def __init__(self) -> None:
        self.beta = 1.0


class Guarded(nn.Module):
    """Reads attributes, objects, containers, its class, and a global."""

    power = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.scale = 1.0
        self.settings, self.space = Settings(), SimpleNamespace(alpha=1.0)
        self.weights = [1.0, {"inner": 2.0}]
        self.table = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return numbers."""
        y = self.dropout(self.norm(self.layer(x))) * self.scale * self.settings.beta * self.space.alpha * self.power
        return y * self.weights[1]["inner"] + GLOBAL["shift"] + getattr(self, "extra", 0.0) + self.table  # type: ignore[index]


class Watching:
    """A model and its programs."""

    def __init__(self, model: nn.Module | None = None, loss_fn: Any = None) -> None:
        self.model: Any = model or Guarded()
        self.programs = Programs(self.model, loss_fn)

    def program(self) -> Program:
        """Return the program for a batch, in the model's mode."""
        return self.programs.find(BATCH, self.model.training)

    @property
    def why(self) -> str:
        """Return why the model was captured last."""
        return "; ".join(list(self.programs.events)[-1].why)
