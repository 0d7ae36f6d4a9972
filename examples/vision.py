"""An image classifier with batch normalisation; each process reads its own rows, as with DDP.

python examples/vision.py
torchrun --nproc-per-node 2 examples/vision.py
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hetu_fx

ROWS, STEPS = 32, 20
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Network(nn.Module):
    """A small convolutional network that returns its loss, so that any plan can run it."""

    def __init__(self) -> None:
        super().__init__()
        stem = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
        body = [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        self.layers = nn.Sequential(*stem, *body, nn.Flatten(), nn.Linear(32, 2))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and what was made of the images."""
        logits = self.layers(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def stripes() -> TensorDataset:
    """Return pictures of noise with a bright stripe, across or upright: that is the label."""
    torch.manual_seed(0)
    labels, images = torch.randint(0, 2, (ROWS * STEPS,)), torch.randn(ROWS * STEPS, 1, 12, 12)
    for image, label, where in zip(images, labels.tolist(), torch.randint(0, 12, (ROWS * STEPS,)), strict=True):
        image[0].select(label, int(where)).add_(2.0)
    return TensorDataset(images, labels)


if __name__ == "__main__":
    data, model = stripes(), Network()
    loader = DataLoader(data, ROWS // WORLD, sampler=DistributedSampler(data, WORLD, RANK, shuffle=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = hetu_fx.auto_parallelize(model, tuple(next(iter(loader))), optimizer=optimizer)  # the one line
    losses = []
    for images, labels in loader:
        loss = model(images, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
