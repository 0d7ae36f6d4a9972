"""A training script that is told to end: `python signal_script.py FOLDER STEPS WHO`, under a launcher or alone.

WHO gets SIGTERM inside step 3: "rank" (rank 1, by itself), "launcher" (what has started the ranks), or "nobody".
Writes FOLDER/rank_R.json where it comes to its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

import hetu_fx


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 20), torch.nn.Linear(20, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)}


def main(folder: Path, steps: int, who: str) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(3)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = hetu_fx.Plan.single(0) if world == 1 else hetu_fx.Plan.data_parallel((0, 1), (3, 1))
    model = hetu_fx.auto_parallelize(model, batch(0), plan=plan, optimizer=optimizer, data="global")
    done = 0
    if (folder / "stopped").is_dir():
        done = model.hetu.load(folder / "stopped", optimizer=optimizer)["done"]
    model.hetu.save_on_signal(folder / "stopped", optimizer=optimizer, extra=lambda: {"done": done})
    for number in range(done, steps):
        for part in range(2):
            model(**batch(2 * number + part)).backward()
            if (number, part) == (3, 0) and (who, rank) in (("rank", 1), ("launcher", 0)):
                os.kill(os.getpid() if who == "rank" else os.getppid(), signal.SIGTERM)
        optimizer.step()
        optimizer.zero_grad()
        done = number + 1
    whole = {name: hetu_fx.full_tensor(parameter.detach()).tolist() for name, parameter in model.named_parameters()}
    (folder / f"rank_{rank}.json").write_text(json.dumps(whole))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
