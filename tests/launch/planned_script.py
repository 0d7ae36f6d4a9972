"""Makes a model parallel by a plan file: `planned_script.py FILE`."""

from __future__ import annotations

import sys

import torch

import hetu_fx


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


hetu_fx.auto_parallelize(Net(), (torch.ones(6, 4),), plan=sys.argv[1], data="global")
