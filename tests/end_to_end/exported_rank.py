"""Run one rank of an exported variant: `python exported_rank.py FOLDER VARIANT PROCESSES RANK` prints the loss."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hetu_fx.export.load import load_exported


def main(folder: Path, variant: str, processes: int, rank: int) -> None:
    if processes > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store_{variant}",
            rank=rank,
            world_size=processes,
            timeout=timedelta(seconds=40),
        )
    exported = load_exported(folder / "export", variant, rank)
    given = torch.load(folder / "batch.pt")
    values = exported.load_weights(load_file(folder / "weights" / "model.safetensors"))
    values.update({("input", name): tensor for name, tensor in given["batch"].items()})
    for slot in exported.slots:
        if slot["kind"] == "count":
            values["count", slot["name"]] = torch.tensor(given["count"])
    loss = next(value for (kind, _), value in exported(values).items() if kind == "loss")
    print(float(loss), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
