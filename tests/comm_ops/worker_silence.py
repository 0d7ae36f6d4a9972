"""Rank 0 waits for a rank that never comes, then for one that has died; both must end in a CommError.

Run as `python worker_silence.py rank size init_file`.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from time import sleep

import torch
import torch.distributed as dist

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.comm_ops.resolve.resolve import resolve
from hetu_fx.errors import CommError


def expect_error(source: str, target: str) -> None:
    (call,) = resolve(parse_annotation(source), parse_annotation(target), (4,)).calls(0)
    try:
        getattr(torch.ops.hetu, call.op)(torch.ones(4), *call.args)
    except CommError as error:
        print(error, flush=True)
    else:
        raise AssertionError(f"{call} should have failed")


def wait_for_all(rank: int, size: int, path: Path) -> None:
    """Wait until all ranks have imported what they need, which on a busy machine takes longer than the timeout."""
    path.with_name(f"{path.name}{rank}").touch()
    while not all(path.with_name(f"{path.name}{other}").exists() for other in range(size)):
        sleep(0.1)


def main(rank: int, size: int, path: str) -> None:
    wait_for_all(rank, size, Path(path).with_name("started"))
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=3)
    )
    dist.barrier()
    if rank == 2:
        os._exit(0)
    if rank == 1:
        sys.stdin.read()  # stays silent until the test closes the pipe or kills it
        return
    expect_error("[0,1] P(2)", "[0,1] D(2)")
    expect_error("[0-2] P(3)", "[0-2] D(3)")
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
