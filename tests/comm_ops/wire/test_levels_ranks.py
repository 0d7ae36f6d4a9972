"""Collectives at two tiers, pairs in nodes and nodes in racks: what arrives is what a flat one brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetu_fx.comm_ops.plans.algorithm import Algorithm
from tests.spawned import results_of

RANKS = tuple(range(8))
TIERS = Algorithm((0, 0, 1, 1, 2, 2, 3, 3), 0, outer=((0, 0, 0, 0, 1, 1, 1, 1),))
UNEVEN = Algorithm((0, 0, 0, 1, 2, 2, 3, 3), 0, outer=((0, 0, 0, 0, 1, 1, 1, 1),))
SIZES = (3, 1, 4, 1, 5, 0, 2, 6)


def collect(rank: int, store: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from hetu_fx.comm_ops.wire.groups import GroupTable
    from tests.comm_ops.at_once import chosen

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(RANKS))
    table, found = GroupTable(), []
    whole = torch.arange(float(sum(SIZES))) + 100 * rank
    shapes = [[size] for size in SIZES]
    for algorithm in (TIERS, UNEVEN):
        summed = chosen(RANKS, algorithm, table).sum(whole).wait()
        gathered = chosen(RANKS, algorithm, table).gather(whole.split(SIZES)[rank], shapes).wait()
        scattered = chosen(RANKS, algorithm, table).scatter(whole.split(SIZES)).wait()
        found.append((summed.tolist(), torch.cat(list(gathered)).tolist(), scattered.tolist()))
    results.put((rank, found))
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_two_tiers_bring_what_a_flat_collective_brings(tmp_path: Path) -> None:
    import torch

    found = results_of(collect, len(RANKS), str(tmp_path / "store"), seconds=200)
    plain = torch.arange(float(sum(SIZES)))
    parts = plain.split(SIZES)
    gathered = torch.cat([part + 100 * rank for rank, part in enumerate(parts)]).tolist()
    total = 8 * plain + 2800
    for rank in RANKS:
        for outcome in found[rank]:
            assert outcome == (total.tolist(), gathered, total.split(SIZES)[rank].tolist())
