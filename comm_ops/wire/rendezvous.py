"""Processes that a launcher has started meet in its store, whatever an earlier start has left there.

torchrun keeps one store for all starts of its workers, and gloo's addresses stand under the same names each time: a
worker that is started again may read the address of one that is gone (pytorch issue 135712, seen in torch 2.13).
Counting starts is no way out, as each node's agent counts its own. So rank 0 draws the name under which this start's
keys stand, and tells it to whoever says hello with a word that is new.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta

from hetu_fx.base.torch_private import PrefixStore, Store, TCPStore
from hetu_fx.errors import EnvironmentProblem

SECONDS = 300.0

_PAUSE_SECONDS = 0.005
_ROOT = "hetu_fx/meeting"


def launcher_store() -> Store | None:
    """Return a store with nothing in it that all workers of this start share; None where the launcher hosts none.

    Raises EnvironmentProblem where the others do not come within 5 minutes.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=SECONDS))
    return unused_part(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def unused_part(store: Store, rank: int, world: int, seconds: float = SECONDS) -> Store:
    """Return a part of a store that nobody has written to, the same for all ranks of one start; collective."""
    deadline = time.monotonic() + seconds

    def is_late(waits_for: Callable[[], object]) -> None:
        if time.monotonic() > deadline:
            raise EnvironmentProblem(
                f"rank {rank} of {world} has waited {seconds:g} s for {waits_for()} to start; "
                "look for the reason in the output of the others"
            )
        time.sleep(_PAUSE_SECONDS)

    name = _welcome_all(store, world, is_late) if rank == 0 else _say_hello(store, rank, is_late)
    return PrefixStore(f"hetu_fx/start-{name}", store)


def _welcome_all(store: Store, world: int, is_late: Callable[[Callable[[], object]], None]) -> str:
    name = secrets.token_hex(8)
    answered: dict[int, bytes] = {}
    absent = set(range(1, world))
    while absent:
        for rank in sorted(absent):
            if store.check([f"{_ROOT}/{name}/{rank}"]):
                absent.discard(rank)
            elif store.check([f"{_ROOT}/hello/{rank}"]):
                word = store.get(f"{_ROOT}/hello/{rank}")
                if answered.get(rank) != word:  # or it is left from an earlier start, and will be overwritten
                    store.set(f"{_ROOT}/welcome/{rank}", f"{word.decode()} {name}")
                    answered[rank] = word
        if absent:
            is_late(lambda: f"ranks {sorted(absent)}")
    return name


def _say_hello(store: Store, rank: int, is_late: Callable[[Callable[[], object]], None]) -> str:
    word = secrets.token_hex(8)
    store.set(f"{_ROOT}/hello/{rank}", word)
    while True:
        if store.check([f"{_ROOT}/welcome/{rank}"]):
            to, name = store.get(f"{_ROOT}/welcome/{rank}").decode().split()
            if to == word:
                store.set(f"{_ROOT}/{name}/{rank}", "here")
                return name
        is_late(lambda: "rank 0")
