"""Workers that are started again meet in a store that is full of what those before them wrote."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, Store

from hetu_fx.comm_ops.wire.rendezvous import launcher_store, unused_part
from hetu_fx.errors import EnvironmentProblem

WORLD = 3


def start(store: Store, world: int = WORLD) -> list[Store]:
    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(lambda rank: unused_part(store, rank, world, seconds=60), range(world)))


def test_all_ranks_of_a_start_share_one_part() -> None:
    ranks = start(HashStore())
    ranks[0].set("address", "here")
    assert [rank.get("address") for rank in ranks] == [b"here"] * WORLD


def test_what_an_earlier_start_wrote_is_not_seen() -> None:
    store = HashStore()
    start(store)[0].set("address", "of a process that is gone")
    assert not any(rank.check(["address"]) for rank in start(store))
    assert not any(rank.check(["address"]) for rank in start(store, world=2))


def test_a_start_that_stopped_half_way_does_not_disturb_the_next() -> None:
    store = HashStore()
    for rank in range(WORLD):
        with pytest.raises(EnvironmentProblem, match=r"has waited 0\.05 s for"):
            unused_part(store, rank, WORLD, seconds=0.05)
    ranks = start(store)
    ranks[1].set("address", "here")
    assert [rank.get("address") for rank in ranks] == [b"here"] * WORLD


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(EnvironmentProblem, match=r"for ranks \[1, 2\] to start"):
        unused_part(HashStore(), 0, WORLD, seconds=0.01)


def test_without_a_launchers_store_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert launcher_store() is None
