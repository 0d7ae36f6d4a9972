"""Two ranks train a few steps with snapshots, wherever they may; each writes its loss to the folder that is given."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch
from torch import nn

import hetu_fx

HIDDEN = 16384  # of float32: more than the small shared memory has


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def main(folder: Path) -> None:
    logging.basicConfig()
    torch.manual_seed(0)
    plain, batch = Net(), {"x": torch.randn(8, 32), "y": torch.randn(8, 4)}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = hetu_fx.auto_parallelize(plain, batch, optimizer=optimizer)
    snapshots = model.hetu.snapshots(optimizer)
    for _ in range(3):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        snapshots.step()
    snapshots.wait()
    (folder / f"rank{os.environ['RANK']}").write_text(f"{float(loss.detach())} {snapshots.last_step}")
    snapshots.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
