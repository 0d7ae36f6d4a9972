"""What the test on several machines trains: it says each step, and at last the sum of the parameters.

`elastic_script.py STEPS PAUSE_SECONDS`; a step's batch is the same 24 rows whoever is there. For STEPS there may be a
file that says it, and may change it as long as it is ahead.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import hetu_fx

PAUSE_SECONDS = float(sys.argv[2])
ROWS = 24


def steps() -> int:
    """Return how many there are to be."""
    return int(sys.argv[1] if sys.argv[1].isdigit() else Path(sys.argv[1]).read_text())


def say(line: str) -> None:
    """Write a line at once: the processes of a machine write to one pipe, and print writes its end by itself."""
    os.write(1, f"{line}\n".encode())


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 40), torch.nn.Linear(40, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.down(torch.tanh(self.up(x))), labels)


def main() -> None:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    data = [{"x": torch.randn(ROWS, 6), "labels": torch.randint(3, (ROWS,))} for _ in range(4)]
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    plan = hetu_fx.Plan.data_parallel(range(world))
    model = hetu_fx.auto_parallelize(net, dict(data[0]), plan=plan, optimizer=optimizer, data="global")
    snapshots = model.hetu.snapshots(optimizer)
    resumed = snapshots.resume()
    say(f"start rank {rank} of {world} at {resumed.step} from {resumed.source} in {os.getpid()}")
    step = resumed.step
    while step < steps():
        optimizer.zero_grad()
        model(**data[step % len(data)]).backward()
        optimizer.step()
        step += 1
        say(f"step {step} of {world}")
        snapshots.step({"batch": step})
        time.sleep(PAUSE_SECONDS)
    total = float(sum(value.sum() for value in model.state_dict().values()))
    snapshots.close()  # the others still read of this one
    say(f"end {total:.12f}")


if __name__ == "__main__":
    main()
