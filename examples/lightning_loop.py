"""Lightning: a LightningModule and a Trainer as they are, with accumulation, clipping and validation.

python examples/lightning_loop.py
torchrun --nproc-per-node 2 examples/lightning_loop.py
"""

from __future__ import annotations

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hetu_fx  # noqa: F401  (with it Lightning knows the strategy)

ROWS, STEPS = 16, 40
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Network(LightningModule):
    """Two layers; the loss is made outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions."""
        return self.down(torch.relu(self.up(x)))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss of this process's rows."""
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(ROWS * STEPS, 8)
    data = TensorDataset(x, x.square().sum(1, keepdim=True) / 8)
    sampler = torch.utils.data.DistributedSampler(data, WORLD, int(os.environ.get("RANK", "0")), shuffle=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        strategy="hetu_fx", devices=WORLD, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=1.0, **quiet
    )  # the one line
    model = Network()
    trainer.fit(model, DataLoader(data, ROWS // WORLD, sampler=sampler))
    print(f"loss: {model.losses[0]:.4f} -> {model.losses[-1]:.4f}")
