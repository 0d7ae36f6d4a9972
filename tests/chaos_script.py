"""What `tests.chaos` trains: a script as users write it, that also says what it does.

`python chaos_script.py FOLDER STEPS` under a launcher; writes FOLDER/result.json once all steps are done.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import hetu_fx

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROWS, SAVE_EVERY = 24, 7


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 40)
        self.dropout = torch.nn.Dropout(0.2)
        self.down = torch.nn.Linear(40, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.down(self.dropout(torch.tanh(self.up(x))))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels)}


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Say what this process is at."""
    (FOLDER / f"phase_{os.getpid()}").write_text(name)
    try:
        yield
    finally:
        (FOLDER / f"phase_{os.getpid()}").write_text("between")


def batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 3, (ROWS,), generator=generator)}


def tell(**what: object) -> None:
    """Tell what is done, and when."""
    if RANK == 0:
        with (FOLDER / "progress.jsonl").open("a") as file:
            file.write(json.dumps({"seconds": time.monotonic(), "world": WORLD, **what}) + "\n")


def train() -> None:
    torch.manual_seed(3)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = replace(hetu_fx.Plan.data_parallel(tuple(range(WORLD)), tuple(range(1, WORLD + 1))), zero=1)
    with phase("plan"):
        model = hetu_fx.auto_parallelize(model, batch(0), plan=plan, optimizer=optimizer, data="global", seed=1)
    with phase("load"):
        snapshots = model.hetu.snapshots(optimizer, checkpoints=FOLDER / "saved")
        resumed = snapshots.resume()
    seen = list(resumed.extra.get("seen", []))
    tell(resumed=len(seen), source=resumed.source)
    while len(seen) < STEPS:
        with phase("forward"):
            loss = model(**batch(len(seen)))["loss"]
        with phase("backward"):
            loss.backward()
        with phase("step"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(len(seen))
        with phase("snapshot"):
            snapshots.step({"seen": seen})
        if len(seen) % SAVE_EVERY == 0:
            with phase("save"):
                saved = FOLDER / "saved" / f"step_{len(seen)}"
                model.hetu.save(saved, optimizer=optimizer, extra={"seen": seen})
        tell(step=len(seen))
    whole = {name: parameter.detach().full_tensor().tolist() for name, parameter in model.named_parameters()}
    if RANK == 0:
        (FOLDER / "result.json").write_text(json.dumps({"seen": seen, "parameters": whole}))


train()
