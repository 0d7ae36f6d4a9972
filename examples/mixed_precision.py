"""Mixed precision: bfloat16 where autocast says so, parameters and their updates in float32.

python examples/mixed_precision.py
torchrun --nproc-per-node 2 examples/mixed_precision.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hetu_fx

ROWS, STEPS = 32, 20


class Network(nn.Module):
    """Layers with a residual, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 64), nn.Linear(64, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error."""
        hidden = self.into(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.mse_loss(self.out(hidden).float(), y)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    x = torch.randn(STEPS, ROWS, 8)
    y = x.square().mean(-1, keepdim=True)
    model = hetu_fx.auto_parallelize(model, (x[0], y[0]), optimizer=optimizer, data="global")  # the one line
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x[step], y[step])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
