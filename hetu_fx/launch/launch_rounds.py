"""Who takes part in each start of a job's script: the processes of this machine, or those of several that meet.

Of several machines a process of its own goes to the rendezvous, so that the launcher never waits for a network, and has
one thread when it forks. Both tell each other messages as launcher and workers do.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousParameters

from hetu_fx.base.addresses import LOOPBACK
from hetu_fx.comm_ops.wire.rendezvous import serve_store
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.launch.job import Message, MessageChannel, NodesSpec, fork_child
from hetu_fx.launch.rendezvous_handler import BACKEND, HetuRendezvous

STORE_SECONDS = 300.0
_END_SECONDS = 10.0  # for the process at the rendezvous to end, beyond what it waits for the others
OUT_OF_REACH_STATUS = 75  # EX_TEMPFAIL: the other machines cannot be reached any more

Descriptors = Callable[[], Sequence[int]]
"""File descriptors that are the launcher's alone; see `fork_child`."""


@dataclass(frozen=True, slots=True)
class LaunchRound:
    """A start of the script, as one machine sees it.

    Attributes:
        first_rank: of this machine's processes.
        world: number of processes on all machines.
        address: of the store in which they meet.
        port: of that.
        node: this machine's place among all.
        nodes: the names of all machines.
    """

    first_rank: int
    world: int
    address: str
    port: int
    node: int
    nodes: tuple[str, ...]


class LocalRounds:
    """Of a job on this machine alone: whoever is there takes part. For what its methods are see `NodeRounds`."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self.store: StoreProcess | None = None

    def descriptors(self) -> list[int]:
        """Return that of the store's process."""
        return [] if self.store is None else [self.store.channel.fileno()]

    def ask(self, workers: int, reason: str) -> LaunchRound | None:
        """Return the next start; its store is a new one, as that of the start before is full of its addresses."""
        self.end()
        self.store = StoreProcess(self._descriptors())
        return LaunchRound(0, workers, LOOPBACK, self.store.port, 0, ("this machine",))

    def finish(self) -> bool:
        """Return True."""
        return True

    def close(self, reason: str, *, is_of_all: bool) -> None:
        """There is nobody to tell."""

    def end(self) -> None:
        """End the store."""
        if self.store is not None:
            self.store.end()
            self.store = None


class NodeRounds:
    """Of a job on several machines: those take part that have met. `channel` is that of the process that goes there."""

    def __init__(self, spec: NodesSpec, descriptors: Descriptors) -> None:
        self._descriptors, self._end_seconds = descriptors, spec.times.reach + _END_SECONDS
        self._stores: list[StoreProcess] = []  # the last one is for the round that was asked for last
        self._address = ""
        self._asked = 0
        self._settled: LaunchRound | None = None
        self.process, end = fork_child(partial(_go_to_rendezvous, spec), ())
        end.setblocking(False)
        self.channel = MessageChannel(end)

    def descriptors(self) -> list[int]:
        """Return file descriptors that are the launcher's alone; see `fork_child`."""
        return [self.channel.socket.fileno(), *(store.channel.fileno() for store in self._stores)]

    def take(self, message: Message) -> None:
        """Take note of what concerns rounds: the address of this machine, or a round that is settled."""
        match message:
            case {"kind": "is at", "address": address}:
                self._address = address
            case {"kind": "round", "own_port": port} if self._stores and port == self._stores[-1].port:
                fields = {name: value for name, value in message.items() if name not in ("kind", "own_port")}
                self._settled = LaunchRound(**{**fields, "nodes": tuple(message["nodes"])})

    def ask(self, workers: int, reason: str) -> LaunchRound | None:
        """Want to be in the next start, and return it once it is settled; until then `workers` may change.

        Each time a store is served: the round says at once where its workers meet, whoever turns out to be the first.
        Those of before are served until the round is settled, for workers elsewhere that still go there.

        Args:
            workers: how many processes this machine brings.
            reason: why the last start ended before a step's end; "" where it did not.
        """
        if self._settled is not None:
            settled, self._settled, self._asked = self._settled, None, 0
            self._end_stores(but_last=settled.node == 0)
            return settled
        if self._address and workers != self._asked:
            changes = "the number of processes of a machine has changed" if self._asked else ""
            self._stores.append(StoreProcess(self._descriptors(), self._address))
            self._asked = workers
            self.channel.send("ask", workers=workers, port=self._stores[-1].port, reason=reason or changes)
        return None

    def finish(self) -> bool:
        """Tell that the processes here are done; return whether all are, of which a message tells otherwise."""
        self.channel.send("finish")
        return False

    def close(self, reason: str, *, is_of_all: bool) -> None:
        """Leave the job, at a step's end or for a reason; if `is_of_all`, it ends."""
        self.channel.send("close", reason=reason, is_of_all=is_of_all)

    def end(self) -> None:
        """Wait for the process at the rendezvous, which may serve it for the others a little longer."""
        self.channel.socket.settimeout(self._end_seconds)
        for _ in self.channel.messages():
            pass
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        self._end_stores(but_last=False)

    def _end_stores(self, *, but_last: bool) -> None:
        ended, self._stores = self._stores, self._stores[-1:] if but_last else []
        for store in ended[: len(ended) - len(self._stores)]:
            store.end()


class StoreProcess:
    """A process that serves a new store on `port` of an address until `end`, or until its parent is gone.

    In it the workers of one start meet; it is a process of its own, so that no worker takes it along: who connects to
    a store that is gone tries for minutes, and cannot be told to leave off (torch 2.13). For `others` see `forked`.
    """

    def __init__(self, others: Iterable[int] = (), address: str = LOOPBACK) -> None:
        self.process, self.channel = fork_child(partial(_serve, address), others)
        self.port = int(self.channel.recv(16))

    def end(self) -> None:
        """Stop serving; whoever waits for a key gets an error."""
        self.channel.close()
        os.waitpid(self.process, 0)


def _ignore_ends() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # workers that are told to end still meet here
        signal.signal(number, signal.SIG_IGN)


def _serve(address: str, channel: socket.socket) -> int:
    _ignore_ends()
    store = serve_store(address, 0, timedelta(seconds=STORE_SECONDS))
    channel.send(str(store.port).encode())
    return len(channel.recv(1))  # nobody writes: the other end is closed, or gone


def _go_to_rendezvous(spec: NodesSpec, end: socket.socket) -> int:
    """Be the process of a machine at the rendezvous."""
    _ignore_ends()
    channel = MessageChannel(end)
    run_id = f"{spec.run_id} (hetu-fx launch)"  # torchrun numbers workers in another way
    counts = spec.least, spec.most
    try:
        rendezvous = HetuRendezvous(
            RendezvousParameters(BACKEND, spec.endpoints, run_id, *counts, **asdict(spec.times))
        )
    except (RendezvousError, EnvironmentProblem, OSError) as error:
        channel.send("refused", reason=str(error))
        return 1
    channel.send("is at", address=rendezvous.address)
    NodeAtRendezvous(channel, rendezvous).work()
    return 0


class NodeAtRendezvous:
    """Joins rounds as the launcher asks, tells it of those that are settled, and of what ends the one under way."""

    def __init__(self, channel: MessageChannel, rendezvous: HetuRendezvous) -> None:
        self._channel, self._rendezvous = channel, rendezvous
        self._wait: Any = None
        self._told = ""
        self._is_in = False

    def work(self) -> None:
        """Do so until the launcher leaves the job, or is gone."""
        while self._hear():
            try:
                self._look()
            except RendezvousClosedError:
                self._closed()
            except (RendezvousError, EnvironmentProblem) as error:
                self._wait = None
                self._channel.send("refused", reason=str(error), was_in=self._is_in)

    def _hear(self) -> bool:
        """Do what the launcher says; returns whether this node is still in the job."""
        if not select.select([self._channel.socket], [], [], self._rendezvous.pause)[0]:
            return True
        messages = self._channel.receive()
        return messages is not None and all(map(self._do, messages))

    def _do(self, message: Message) -> bool:
        match message:
            case {"kind": "ask", "workers": workers, "port": port, "reason": reason}:
                why = reason and f"{self._rendezvous.name}: {reason}"
                self._wait = self._rendezvous.new_wait(workers, port, why)
                self._told = ""
            case {"kind": "finish"}:
                with suppress(RendezvousError):  # the launcher is told that it is gone
                    self._rendezvous.finish()
            case {"kind": "close", "reason": reason, "is_of_all": closes}:
                with suppress(RendezvousError):  # nobody is there to be told
                    self._rendezvous.leave(reason and f"{self._rendezvous.name}: {reason}", closes=closes)
                return False
        return True

    def _look(self) -> None:
        if self._wait is None:
            self._tell(*self._rendezvous.news())
        elif not self._rendezvous.has_twin() and (settled := self._rendezvous.attempt(self._wait)) is not None:
            self._wait, self._told, self._is_in = None, "", True
            self._channel.send("round", **self._rendezvous.describe(settled))

    def _tell(self, kind: str, reason: str) -> None:
        """Tell what the launcher does not know yet."""
        if self._is_in and kind and kind != self._told:
            self._told = kind
            self._channel.send(kind, reason=reason)

    def _closed(self) -> None:
        self._wait = None
        self._told = "closed"
        self._channel.send("closed", reason=self._rendezvous.why_closed())
