"""Processes that a launcher has started meet in its store, whatever an earlier start has left there.

torchrun keeps one store for all starts of its workers, and gloo's addresses stand under the same names each time: a
worker that is started again may read the address of one that is gone (pytorch issue 135712, seen in torch 2.13).
Counting starts is no way out, as each node's agent counts its own. So rank 0 draws the name under which this start's
keys stand, and tells it to whoever says hello with a word that is new.

Before they connect, ranks tell each other where they are reached, and those of different machines try it: gloo itself
takes minutes to fail on one machine, and does not fail at all on the other.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.rendezvous import rendezvous

from hetu_fx.base.addresses import LOOPBACK, LOOPBACK_NAMES, VARIABLE, Contact, rank_addresses, socket_family
from hetu_fx.base.torch_private import PrefixStore, Store, TCPStore
from hetu_fx.errors import EnvironmentProblem

SECONDS = 300.0
DIAL_SECONDS = 10.0
"""For which a rank tries to reach another one."""
TELL_SECONDS = 30.0
"""For which ranks that have met wait for each other's word."""

_PAUSE_SECONDS = 0.005
_ROOT = "hetu_fx/meeting"
_MOST_TOLD = 3


def meet(rank: int, world: int) -> tuple[Store, str | None]:
    """Return a store that all ranks of this start share, and the address at which gloo is to be reached; collective.

    The address is None where the user has named an interface for gloo.

    Raises:
        EnvironmentProblem: on all ranks, where some cannot reach each other.
    """
    store = launcher_store() or unused_part(_own_store(rank, world), rank, world)
    address = _agree_on_addresses(store, rank, world, os.environ["MASTER_ADDR"])
    return store, None if os.environ.get(VARIABLE) else address


def _own_store(rank: int, world: int) -> Store:
    """Return the store that rank 0 serves where no launcher does; at the loopback, where that is where others look."""
    host, port, bound = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=SECONDS)
    if rank == 0 and host in LOOPBACK_NAMES:
        with suppress(OSError):  # this process serves one there already, which torch goes on with
            return serve_store(LOOPBACK, port, bound)
    store: Store = next(rendezvous("env://", rank, world, timeout=bound))[0]
    return store


def serve_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Serve a store at one address of this machine (port 0: at any); torch's own listens at all of them."""
    listening = socket.create_server((address, port), family=socket_family(address), backlog=1024)
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )


def _agree_on_addresses(store: Store, rank: int, world: int, host: str) -> str:
    """Return the address at which this rank is reached; all ranks must be able to reach each other. Collective.

    Args:
        store: where the ranks have met.
        rank: of this process.
        world: number of ranks.
        host: at which the rendezvous is.

    Raises:
        EnvironmentProblem: on all ranks, which names the addresses of two that do not reach each other.
    """
    meeting = _Meeting(store, rank, world)
    own = _outcome(lambda: asdict(Contact.own(host)))
    reaches = [Contact(**told) for told in meeting.exchange("reach", range(world), own, SECONDS)]
    addresses = rank_addresses(reaches)
    networks = [reach.network for reach in reaches]
    firsts = sorted({network: at for at, network in reversed(list(enumerate(networks)))}.values())
    if len(firsts) > 1:
        _try(meeting, addresses, firsts)
    return addresses[rank]


def _try(meeting: _Meeting, addresses: Sequence[str], firsts: Sequence[int]) -> None:
    """Have the first rank of each network connect to all others; all ranks hear what has come of it."""
    rank = meeting.rank
    with ExitStack() as listening:
        port, dialled = None, None
        if rank in firsts:
            port = _outcome(lambda: listening.enter_context(_server(addresses[rank])).getsockname()[1])
        ports = meeting.exchange("port", firsts, port, TELL_SECONDS)
        if rank in firsts:
            others = [(at, addresses[at], at_port) for at, at_port in zip(firsts, ports, strict=True) if at != rank]
            dialled = _outcome(lambda: _dial(rank, addresses[rank], others))
        meeting.exchange("dialled", firsts, dialled, TELL_SECONDS)


@dataclass(frozen=True)
class _Meeting:
    """Ranks that tell each other things in a store, which the first of them may serve."""

    store: Store
    rank: int
    world: int

    def exchange(self, what: str, tell: Iterable[int], own: Any, seconds: float) -> list[Any]:
        """Return what some ranks tell, once all of them have; raises on all ranks what one of them failed with."""
        keys = {at: f"{_ROOT}/{what}/{at}" for at in tell}
        if self.rank in keys:
            self.store.set(keys[self.rank], json.dumps(own))
        try:
            self.store.wait(list(keys.values()), timedelta(seconds=seconds))
        except RuntimeError as error:
            absent = [at for at, key in keys.items() if not self.store.check([key])]
            raise self._failure(
                what,
                f"ranks {absent} have not told within {seconds:g} s where they are reached ({what}); look for the "
                "reason in their output",
                absent,
            ) from error
        told = [json.loads(text) for text in self.store.multi_get(list(keys.values()))]
        failed = [(at, one["failed"]) for at, one in zip(keys, told, strict=True) if "failed" in one]
        if failed:
            raise self._failure(what, "; ".join(f"rank {at}: {reason}" for at, reason in failed[:_MOST_TOLD]))
        return [one["found"] for one in told]

    def _failure(self, what: str, reason: str, absent: Sequence[int] = ()) -> EnvironmentProblem:
        """Return the error to raise; on the first rank, with which the store ends, once the others know it too."""
        known = {at: f"{_ROOT}/{what}/known/{at}" for at in range(self.world) if at not in absent}
        self.store.set(f"{_ROOT}/{what}/known/{self.rank}", "")
        if self.rank == 0:
            with suppress(RuntimeError):  # a rank that is gone comes to know nothing
                self.store.wait(list(known.values()), timedelta(seconds=TELL_SECONDS))
        return EnvironmentProblem(reason)


def _outcome(find: Callable[[], Any]) -> dict[str, Any]:
    """Return what is found, or why it cannot be, as it is told to the other ranks."""
    try:
        return {"found": find()}
    except (EnvironmentProblem, OSError) as error:
        return {"failed": str(error)}


def _server(address: str) -> socket.socket:
    try:
        return socket.create_server((address, 0), family=socket_family(address), backlog=128)
    except OSError as error:
        raise EnvironmentProblem(f"nothing can listen at {address}: {error}") from error


def _dial(rank: int, own: str, others: Sequence[tuple[int, str, int]]) -> None:
    """Connect to each of the others once; their kernels answer."""
    for other, address, port in others:
        try:
            socket.create_connection((address, port), timeout=DIAL_SECONDS).close()
        except OSError as error:
            raise EnvironmentProblem(
                f"rank {rank} at {own} cannot reach rank {other} at {address} port {port}: {error}\n"
                f"hint: let processes of these machines connect to each other at all ports, or set {VARIABLE} on each "
                f"machine to the interface that leads to the others (see 'ip address')"
            ) from error


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
