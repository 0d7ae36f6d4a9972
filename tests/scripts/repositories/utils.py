"""What repositories keep in a file of this name: processes, options, data loaders, averages, the log, checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def options(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of what all scripts take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--plan", default=None, help="a plan of hetu_fx, or its file; left out: plain PyTorch")
    parser.add_argument("--batch-size", type=int, default=8, help="of all processes together")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float64")
    parser.set_defaults(**defaults)
    return parser


def setup(args: argparse.Namespace) -> tuple[int, int]:
    """Join the other processes, seed everything; return the rank of this process and how many there are."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_default_dtype(getattr(torch, args.dtype))
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
    return rank, world


def loader(
    data: Dataset[Any], args: argparse.Namespace, rank: int, world: int, *, train: bool = True, collate: Any = None
) -> DataLoader[Any]:
    """Return a loader of this process's rows; call `set_epoch` of its sampler."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, shuffle=train, seed=args.seed)
    return DataLoader(data, args.batch_size // world, sampler=sampler, collate_fn=collate, drop_last=train)


def average(*values: float | Tensor) -> list[float]:
    """Return the means over processes."""
    found = torch.tensor([float(torch.as_tensor(value).detach()) for value in values], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return found.tolist()


def total(*values: float | Tensor) -> list[float]:
    """Return the sums over processes."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return [value * world for value in average(*values)]


class Log:
    """Lines of numbers in a file, which the first process writes."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self._path = args.out / "log.jsonl" if rank == 0 else None

    def __call__(self, **values: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(values) + "\n")


def save(path: Path, rank: int, **values: Any) -> None:
    """Write a checkpoint on the first process, for which the others wait."""
    if rank == 0:
        torch.save(values, path)
    if dist.is_initialized():
        dist.barrier()


def read_log(folder: Path) -> Iterable[dict[str, Any]]:
    """Return the lines of a log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
