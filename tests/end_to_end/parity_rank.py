"""One rank of the parity runs; cells are read from FOLDER/cells.json.

Models are small and ranks cost seconds to start, so all cells run in the same processes; smaller plans use the first
ranks as a world of their own. There is a rank for each device; one device on the CPU is the reference for all.
"""

from __future__ import annotations

import copy
import json
import os
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hetu_fx
from hetu_fx.errors import HetuFxError
from hetu_fx.lockstep import move_model as to_device
from tests.end_to_end.cells import (
    DEFAULT_TOLERANCE,
    LOSS_FNS,
    PLANS,
    STEPS,
    TOLERANCES,
    Cell,
    in_double,
    make_batch,
    make_model,
)
from tests.kinds import testkind
from tests.ranks.remembered import remembered_captures


def own_rows(batch: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    """Cut the batch unevenly over ranks: the first brings the most, the last may bring none."""
    rows = next(iter(batch.values())).size(0)
    cuts = [rows - rows // (2**i) for i in range(world)] + [rows]
    return {name: tensor[cuts[rank] : cuts[rank + 1]] for name, tensor in batch.items()}


def place_of(device: str) -> str:
    """Return a device of a rank; makes the tests' own type of devices known where it is of that."""
    return str(testkind.install()) if device == testkind.NAME else device


def run_cell(cell: Cell, group: dist.ProcessGroup | None, rank: int, device: str = "cpu") -> dict[str, Any]:
    """Train the reference and the parallel model side by side; return the worst differences by step."""
    reference = make_model(cell.model, **cell.sizes)
    model = to_device(copy.deepcopy(reference), torch.device(device))
    loss_fn = LOSS_FNS.get(cell.model)
    first = moved(make_batch(cell.model, STEPS[0], 0), device)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    hetu_fx.auto_parallelize(model, first, plan=PLANS[cell.plan], loss_fn=loss_fn, data=cell.data, process_group=group)
    steps = {}
    for number, step in enumerate(STEPS):
        batch = make_batch(cell.model, step, number)
        mine = moved(batch if cell.data == "global" else own_rows(batch, rank, cell.ranks), device)
        expected = loss_of(reference(**batch), loss_fn, batch)
        loss = loss_of(model(**mine), None, mine)
        expected.backward()
        loss.backward()
        steps[step.name] = {
            "loss": abs(float(loss.detach()) - float(expected.detach())),
            "gradient": worst_difference(model, reference, lambda p: p.grad),
        }
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # AdamW divides by the gradient's size, which makes rounding visible where gradients are nearly zero.
    steps["parameters"] = {"parameters": worst_difference(model, reference, lambda p: p) / 10}
    return steps


def moved(batch: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def loss_of(output: Any, loss_fn: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if loss_fn is not None:
        return loss_fn(output, **batch)
    return output["loss"] if isinstance(output, dict) else output.loss


def worst_difference(model: Any, reference: Any, part: Any) -> float:
    """Return the worst relative difference of a tensor, against the largest norm among all as a floor."""
    worst, wholes = 0.0, []
    for home, plain in zip(model.parameters(), reference.parameters(), strict=True):
        found = part(home)
        wholes.append((None if found is None else hetu_fx.full_tensor(found.detach()).cpu(), part(plain)))
    floor = 1e-5 * max(float(e.norm()) for _, e in wholes if e is not None)
    for found, expected in wholes:
        if expected is None:
            difference = 0.0 if found is None else float(found.norm())
        else:
            difference = float((found - expected).norm() / (expected.norm() + floor))
        worst = max(worst, difference)
    return worst


def verdict(cell: Cell, steps: dict[str, Any]) -> dict[str, Any]:
    limit = TOLERANCES.get(cell.model, DEFAULT_TOLERANCE)
    worst = {f"{step} {what}": value for step, found in steps.items() for what, value in found.items()}
    wrong = {what: value for what, value in worst.items() if not value <= limit}
    return {"worst": max(worst.values()), "wrong": wrong}


def main(rank: int, folder: Path, devices: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    world = len(devices)
    torch.set_num_threads(1)
    in_double()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(2, world + 1)}
    results, device = {}, place_of(devices[rank])
    for entry in json.loads((folder / "cells.json").read_text()):
        cell = Cell(*entry)
        if rank < cell.ranks:
            with remembered_captures():
                results[cell.name] = attempt(cell, groups.get(cell.ranks), rank, device)
        (folder / f"rank_{rank}.json").write_text(json.dumps(results))
    os._exit(0)


def attempt(cell: Cell, group: dist.ProcessGroup | None, rank: int, device: str) -> dict[str, Any]:
    try:
        return verdict(cell, run_cell(cell, group, rank, device) if cell.ranks > 1 else alone(cell, device))
    except HetuFxError as error:
        return {"refused": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    except Exception:
        return {"failed": traceback.format_exc()}


def alone(cell: Cell, device: str) -> dict[str, Any]:
    """Run a plan of one device in a world of one."""
    group = dist.new_group([0], use_local_synchronization=True)
    return run_cell(cell, group, 0, device)
