"""A loop with accelerate: its optimizer, its loader, gradient accumulation and clipping.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py
ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 --num_machines 1 examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hetu_fx

ROWS, STEPS = 16, 20


class Network(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error."""
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)


if __name__ == "__main__":
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(ROWS * STEPS, 8)
    data = TensorDataset(x, x.square().sum(1, keepdim=True) / 8)
    loader = DataLoader(data, batch_size=ROWS // accelerator.num_processes)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = hetu_fx.auto_parallelize(model, tuple(next(iter(loader))), optimizer=optimizer)  # the one line
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(*batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
