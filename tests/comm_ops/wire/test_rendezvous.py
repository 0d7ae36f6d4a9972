"""Workers that are started again meet in a store that is full of what those before them wrote."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from hetu_fx.base.addresses import LOOPBACK, Contact
from hetu_fx.comm_ops.wire import rendezvous
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


def test_an_error_of_one_rank_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()

    def own(host: str) -> Contact:
        if host == "nowhere":
            raise EnvironmentProblem("there is no interface eth7")
        return Contact("n", "10.0.0.1", "10.0.0.1")

    def failed(rank: int) -> str:
        with pytest.raises(EnvironmentProblem) as caught:
            rendezvous._agree_on_addresses(store, rank, WORLD, "nowhere" if rank == 1 else "here")
        return str(caught.value)

    monkeypatch.setattr(Contact, "own", own)
    with ThreadPoolExecutor(WORLD) as ranks:
        assert set(ranks.map(failed, range(WORLD))) == {"rank 1: there is no interface eth7"}


def test_the_rank_whose_store_it_is_leaves_after_all_others_know_why(monkeypatch: pytest.MonkeyPatch) -> None:
    store, late = HashStore(), threading.Event()

    class SlowStore:
        """The store as ranks see it whose answers come when the first rank waits for them."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def multi_get(self, keys: list[str]) -> list[bytes]:
            assert late.wait(30)
            return store.multi_get(keys)

    def own(host: str) -> Contact:
        raise EnvironmentProblem("there is no interface eth7")

    def failed(rank: int) -> bool:
        seen: Any = SlowStore() if rank else store
        with pytest.raises(EnvironmentProblem):
            rendezvous._agree_on_addresses(seen, rank, WORLD, "here")
        return store.check([f"hetu_fx/meeting/reach/known/{at}" for at in range(WORLD)])

    monkeypatch.setattr(Contact, "own", own)
    with ThreadPoolExecutor(WORLD) as ranks:
        told = [ranks.submit(failed, rank) for rank in range(WORLD)]
        store.wait(["hetu_fx/meeting/reach/known/0"], timedelta(seconds=30))  # the first one knows, and waits
        late.set()
        assert told[0].result()


def test_ranks_of_several_networks_try_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    found, store = (
        [Contact("n", "127.0.0.1", "127.0.0.2"), Contact("m", "127.0.0.3"), Contact("m", "127.0.0.3")],
        HashStore(),
    )
    monkeypatch.setattr("hetu_fx.base.addresses.is_loopback", lambda address: address == LOOPBACK)
    monkeypatch.setattr(Contact, "own", lambda rank: found[int(rank)])

    def agreed(rank: int) -> str:
        return rendezvous._agree_on_addresses(store, rank, WORLD, str(rank))

    found[1] = Contact("m", "127.0.0.3", "127.0.0.2")
    with ThreadPoolExecutor(WORLD) as ranks:
        assert list(ranks.map(agreed, range(WORLD))) == ["127.0.0.2", "127.0.0.3", "127.0.0.3"]


def test_a_rank_that_tells_nothing_is_named_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SECONDS", 0.05)
    with pytest.raises(EnvironmentProblem, match=r"ranks \[1, 2\] have not told within 0\.05 s"):
        rendezvous._agree_on_addresses(HashStore(), 0, WORLD, LOOPBACK)
