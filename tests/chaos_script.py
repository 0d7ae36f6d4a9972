"""What `tests.chaos` trains: a script as users write it, that also says what it does.

`python chaos_script.py FOLDER [ZERO]` under a launcher does as many steps as FOLDER/steps says, and then writes
FOLDER/result.json. FOLDER/poison_PROCESS makes the next batch of that process one that is no numbers.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

import hetu_fx
from hetu_fx.checkpoint.snapshots import Snapshots
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import BatchError, CheckpointError

FOLDER = Path(sys.argv[1])
ZERO = int(sys.argv[2]) if len(sys.argv) > 2 else 1  # of every other variant; the others have 1
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROWS, SAVE_EVERY, SAVES_KEPT, SWITCH_EVERY = 24, 7, 3, 5
VARIANTS = ("rising", "falling")

now_at = "between"


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
    before = now_at
    say_phase(name)
    try:
        yield
    finally:
        say_phase(before)


def say_phase(name: str) -> None:
    global now_at
    now_at = name
    (FOLDER / f"phase_{os.getpid()}").write_text(name)


@contextmanager
def waiting(table: GroupTable, what: str) -> Iterator[None]:
    """Say so while a backward waits for others."""
    is_sync = now_at == "backward" and table.pauses_work
    with phase("sync") if is_sync else nullcontext(), told_waiting(table, what):
        yield


told_waiting = getattr(GroupTable.waiting, "told", GroupTable.waiting)  # the script is run again in one process
waiting.told = told_waiting  # type: ignore[attr-defined]
GroupTable.waiting = waiting  # type: ignore[method-assign, assignment]


def batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (ROWS,), generator=generator)
    return {"x": x, "labels": labels}


def poisoned(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch, or one without numbers if this process alone is to get one."""
    poison = FOLDER / f"poison_{os.getpid()}"
    if not poison.exists():
        return given
    poison.unlink()
    return {**given, "x": torch.full_like(given["x"], torch.nan)}


def loss_of(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch, no number where ranks compare theirs and one is unlike: all see that alike."""
    try:
        return model(**given)["loss"]
    except BatchError:
        return torch.full((), torch.nan, requires_grad=True)


def tell(**what: object) -> None:
    """Tell what is done, and when."""
    if RANK == 0:
        with (FOLDER / "progress.jsonl").open("a") as file:
            file.write(json.dumps({"seconds": time.monotonic(), "world": WORLD, **what}) + "\n")


def plan(shares: range, name: str, zero: int) -> hetu_fx.Plan:
    return replace(hetu_fx.Plan.data_parallel(tuple(range(WORLD)), tuple(shares)), zero=zero, name=name)


def finish(snapshots: Snapshots, done: int) -> None:
    """Take a snapshot; a step is finished once that is whole, also where others join or leave then."""
    try:
        snapshots.step({"done": done})
    except SystemExit:
        tell(finished=done)
        raise
    tell(finished=done)


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    """Save, and keep few; a disk that is full is no reason to stop."""
    try:
        model.hetu.save(FOLDER / "saved" / f"step_{done:06d}", optimizer=optimizer, extra={"done": done})
    except CheckpointError as error:
        tell(save_failed=str(error))
    if RANK == 0:
        for old in sorted((FOLDER / "saved").glob("step_*"))[:-SAVES_KEPT]:
            shutil.rmtree(old)


def train() -> None:
    torch.manual_seed(3)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plans = [plan(range(1, WORLD + 1), VARIANTS[0], ZERO), plan(range(WORLD, 0, -1), VARIANTS[1], 1)]
    with phase("plan"):
        model = hetu_fx.auto_parallelize(model, batch(0), plan=plans, optimizer=optimizer, data="global", seed=1)
    with phase("load"):
        own = FOLDER / "snapshots" if WORLD == 1 else None  # alone it is compared with, and goes on from nothing
        snapshots = model.hetu.snapshots(
            optimizer, folder=own, checkpoints=FOLDER / "saved", wait=True, stopped_after=10.0
        )
        resumed = snapshots.resume()
    done = int(resumed.extra.get("done", 0))
    tell(resumed=done, source=resumed.source)
    while done < int((FOLDER / "steps").read_text()):
        if done % SWITCH_EVERY == 0:
            with phase("switch"):
                model.hetu.switch(VARIANTS[done // SWITCH_EVERY % 2])
                model.hetu.switch_home(VARIANTS[done // SWITCH_EVERY % 2])
        with phase("forward"):
            loss = loss_of(model, poisoned(batch(done)))
        with phase("backward"):
            loss.backward()
        with phase("step"):
            if loss.isfinite() and torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.step()
            optimizer.zero_grad()
        if not loss.isfinite():  # on all ranks alike: nothing has been applied anywhere
            with phase("load"):
                snapshots.wait()
                done = int(snapshots.resume().extra.get("done", 0))
            tell(rolled_back=done)
            continue
        done += 1
        tell(step=done, loss=loss.item(), kept=snapshots.last_step or resumed.step)
        with phase("snapshot"):
            finish(snapshots, done)
        if done % SAVE_EVERY == 0:
            with phase("save"):
                save(model, optimizer, done)
    whole = {name: hetu_fx.full_tensor(parameter.detach()).tolist() for name, parameter in model.named_parameters()}
    if RANK == 0:
        (FOLDER / "result.json").write_text(json.dumps({"steps": done, "parameters": whole}))


train()
