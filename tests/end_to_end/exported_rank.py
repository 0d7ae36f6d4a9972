"""Run one rank of an exported variant: `python exported_rank.py FOLDER VARIANT PROCESSES RANK` prints the loss.

Of ours only `import hetu_fx` is needed; FOLDER/given.pt has what each rank is given, by its keywords.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import hetu_fx  # noqa: F401  makes our ops known


def main(folder: Path, variant: str, processes: int, rank: int) -> None:
    if processes > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store_{variant}",
            rank=rank,
            world_size=processes,
            timeout=timedelta(seconds=100),
        )
    module = torch.export.load(folder / "export" / "variants" / variant / f"rank{rank}.pt2").module()
    given = torch.load(folder / "given.pt")[variant][rank]
    loss = module(**given)["loss"]
    loss.backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
    print(repr(float(loss)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
