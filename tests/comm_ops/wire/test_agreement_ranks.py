"""Processes that agree by a tree, over gloo: steps in which nothing is unlike, and one in which a rank is leaving."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.spawned import results_of

NUM_RANKS = 4


def agree_in_steps(rank: int, store: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from hetu_fx.comm_ops.wire import consensus
    from hetu_fx.comm_ops.wire.consensus import LocalFacts, agree
    from hetu_fx.comm_ops.wire.groups import GroupTable

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    exchange, found = consensus._exchange, []
    with (
        patch.object(consensus, "TREE_RANKS", 2),
        patch.object(consensus, "node_name", lambda: f"node {rank // 2 + rank // 3}"),  # 2, 1 and 1 ranks
        patch.object(consensus, "_exchange", side_effect=exchange) as gathering,
    ):
        table = GroupTable()
        for step in range(4):
            facts = LocalFacts(1 + rank, "training", counts=(0.1 * rank + step,))
            agreed = agree(table, facts, {"leaving": step == 2 and rank == 3})
            found.append((agreed.rows, agreed.counts, agreed.leaving, gathering.call_count))
    results.put((rank, found))
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_all_processes_agree_to_the_same_bits_and_gather_where_one_has_something_new(tmp_path: Path) -> None:
    found = results_of(agree_in_steps, NUM_RANKS, str(tmp_path / "store"), seconds=200)
    assert all(found[rank] == found[0] for rank in range(NUM_RANKS))
    rows, counts, leaving, gathered = zip(*found[0], strict=True)
    assert set(rows) == {(1, 2, 3, 4)}
    assert [count for (count,) in counts] == pytest.approx([0.6, 4.6, 8.6, 12.6])
    assert leaving == ((), (), (3,), ())
    assert gathered == (1, 1, 2, 3)
