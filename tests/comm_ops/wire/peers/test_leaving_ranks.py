"""What a rank has given to a sum is there for who reads it late, also once its process has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spawned import results_of

SIZE = 5000


def work(rank: int, store: str, results: Any) -> None:
    import os
    import time

    import torch
    import torch.distributed as dist

    from hetu_fx.comm_ops.plans.algorithm import FLAT
    from hetu_fx.comm_ops.wire.algorithms import Collectives
    from hetu_fx.comm_ops.wire.groups import GroupTable
    from hetu_fx.comm_ops.wire.peers.memory import find_peers

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    table = GroupTable()
    peers = find_peers(table, (0, 1))
    assert peers is not None
    under_way = Collectives((0, 1), FLAT, table).sum(torch.arange(SIZE) + float(rank))
    deadline = time.monotonic() + 60
    while rank == 0 and peers.lives(1) and time.monotonic() < deadline:
        time.sleep(0.01)
    results.put((rank, under_way.wait().numpy()))
    if rank == 1:
        results.close()
        results.join_thread()
        os._exit(0)  # at once, whatever others still wait for


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_what_stands_outlives_its_process(tmp_path: Path) -> None:
    import numpy as np

    found = results_of(work, 2, str(tmp_path / "store"), seconds=100)
    for rank in (0, 1):
        assert np.array_equal(found[rank], 2.0 * np.arange(SIZE, dtype=np.float32) + 1)
