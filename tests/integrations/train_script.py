"""A training script as users write it; run alone, under torchrun or under accelerate launch.

`python train_script.py FOLDER plain|accelerate` trains a tiny model and writes FOLDER/rank_R.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import hetu_fx

ROWS, STEPS = 16, 4


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 20)
        self.down = torch.nn.Linear(20, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.down(torch.tanh(self.up(x)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    xs = torch.randn(ROWS * STEPS, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (ROWS * STEPS,), generator=generator)
    return list(zip(xs, labels, strict=True))


def plan(world: int) -> hetu_fx.Plan:
    """Return an uneven plan for two processes."""
    return hetu_fx.Plan.single(0) if world == 1 else hetu_fx.Plan.data_parallel((0, 1), (3, 1))


def plain(folder: Path) -> None:
    """Train without accelerate: each process takes its part of every batch."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(3)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = rows()
    losses, norms = [], []
    for step in range(STEPS):
        mine = data[step * ROWS + rank * ROWS // world : step * ROWS + (rank + 1) * ROWS // world]
        batch = {"x": torch.stack([x for x, _ in mine]), "labels": torch.stack([y for _, y in mine])}
        if step == 0:
            model = hetu_fx.auto_parallelize(model, batch, plan=plan(world), optimizer=optimizer)
        loss = model(**batch)["loss"]
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    report(folder, rank, world, model, losses, norms)


def accelerated(folder: Path) -> None:
    """Train with accelerate: two accumulated micro-steps per update."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(3)
    model = Net().double()
    data = rows()
    size = ROWS // accelerator.num_processes // 2
    loader = torch.utils.data.DataLoader(data, batch_size=size)
    example = {"x": torch.stack([x for x, _ in data[:size]]), "labels": torch.stack([y for _, y in data[:size]])}
    model = hetu_fx.auto_parallelize(model, example, plan=plan(accelerator.num_processes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = [], []
    for x, labels in loader:
        with accelerator.accumulate(model):
            loss = model(x=x, labels=labels)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    report(folder, accelerator.process_index, accelerator.num_processes, model, losses, norms)


def report(
    folder: Path, rank: int, world: int, model: torch.nn.Module, losses: list[float], norms: list[float]
) -> None:
    whole = {name: hetu_fx.full_tensor(parameter.detach()).tolist() for name, parameter in model.named_parameters()}
    made = {"world": world, "losses": losses, "norms": norms, "parameters": whole, "class": type(model).__name__}
    (folder / f"rank_{rank}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    {"plain": plain, "accelerate": accelerated}[sys.argv[2]](Path(sys.argv[1]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
