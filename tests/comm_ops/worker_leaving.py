"""Rank 0 reaches the end of its script while messages are under way that rank 1 answers slowly.

Run as `python worker_leaving.py rank size init_file`. Both must end in order.
"""

import sys
from time import sleep

import torch
import torch.distributed as dist

from hetu_fx.comm_ops.wire.groups import active

MESSAGES = 100


def main(rank: int, size: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    for _ in range(MESSAGES):
        message = dist.all_reduce(torch.ones(4), async_op=True, group=active().base)
        if rank == 1:
            message.wait()
            sleep(0.005)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
