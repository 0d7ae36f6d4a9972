"""A job whose first rank says, while it trains, at which addresses the processes of the job listen."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import hetu_fx

LISTENS = "0A"  # include/net/tcp_states.h


def main() -> None:
    """Train one step; rank 0 looks at all processes below the launcher, or, where it is alone, at itself."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    batch = {"input": torch.ones(2, 4)}
    model = hetu_fx.auto_parallelize(nn.Linear(4, 2), batch, loss_fn=lambda output, input: output.mean())
    model(**batch).loss.backward()
    if world > 1:
        torch.distributed.barrier()
    if rank == 0:
        processes = _below(os.getppid()) if world > 1 else [os.getpid()]
        print(json.dumps({"processes": len(processes), "addresses": sorted(_addresses(processes))}), flush=True)
    if world > 1:
        torch.distributed.barrier()


def _below(root: int) -> list[int]:
    """Return all processes that a process has started, and those that these have; not the agent of torchrun itself."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (entry / "stat").exists():
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found[1:] if "TORCHELASTIC_RUN_ID" in os.environ else found


def _addresses(processes: list[int]) -> Iterator[str]:
    """Yield the addresses at which processes listen."""
    owned = {
        os.readlink(entry)
        for process in processes
        for entry in Path(f"/proc/{process}/fd").iterdir()
        if entry.is_symlink()
    }
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()[:5]
            if state == LISTENS and f"socket:[{line.split()[9]}]" in owned:
                yield socket.inet_ntop(family, _in_order(bytes.fromhex(local.partition(":")[0])))


def _in_order(words: bytes) -> bytes:
    """Return the bytes of an address, which the kernel prints as words of this machine."""
    return b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))


if __name__ == "__main__":
    main()
