"""Run one rank of exported variants: `python exported_rank.py FOLDER PROCESSES RANK VARIANT...` prints their losses.

Of ours only `import hetu_fx` is needed; FOLDER/given.pt has what each rank is given, by its keywords.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import hetu_fx  # noqa: F401  makes our ops known


def main(folder: Path, processes: int, rank: int, variants: list[str]) -> None:
    if processes > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store_of_exported",
            rank=rank,
            world_size=processes,
            timeout=timedelta(seconds=100),
        )
    print(json.dumps({variant: loss_of(folder, variant, rank) for variant in variants}), flush=True)


def loss_of(folder: Path, variant: str, rank: int) -> float:
    """Return the loss of a variant, all of whose parameters get gradients."""
    module = torch.export.load(folder / "export" / "variants" / variant / f"rank{rank}.pt2").module()
    given = torch.load(folder / "given.pt")[variant][rank]
    loss = module(**given)["loss"]
    loss.backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
    return float(loss)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
