"""torchelastic's rendezvous by `membership`: `torchrun --rdzv-backend hetu_fx --rdzv-endpoint host:port --nnodes 1:3`.

The node at the endpoint serves one store at one address. What is in it is text: torch's own rendezvous keeps a pickle
there, which runs code of whoever reaches the port. Each node counts up its beats and reads the others'. Each round has
a store of its own for its workers, served by its first node, so that nobody reads what an earlier round has left.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from importlib import metadata
from typing import Any

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from hetu_fx.base.addresses import LOOPBACK, Contact
from hetu_fx.base.machine import node_name, short_names
from hetu_fx.base.torch_private import PrefixStore, TCPStore
from hetu_fx.comm_ops.wire.rendezvous import serve_store
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.launch.membership import Beats, Member, Membership

BACKEND = "hetu_fx"
SECRET = "HETU_FX_SECRET"
"""Of the environment: a word that all nodes of a job have, so that none joins another job by mistake."""

DEFAULT_PORT = 29400
_VERSION = metadata.version("hetu-fx")
_LOG = logging.getLogger(__name__)
_LOOPBACK_NAMES = ("localhost", "::1", LOOPBACK)


@dataclass(frozen=True)
class Times:
    """What the rendezvous waits for, in seconds; given as `--rdzv-conf beat=0.3,silent=1.5`.

    Attributes:
        beat: between two signs of life of a node.
        silent: without one, after which a node counts as gone.
        last_call: for which the first round waits for more nodes once there are enough.
        come: within which a member must come to a next round although it shows signs of life.
        reach: for which a node tries to reach the endpoint.
        timeout: within which a round must be settled.
    """

    beat: float = 0.3
    silent: float = 1.5
    last_call: float = 0.5
    come: float = 60.0
    reach: float = 10.0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) <= 0:
                raise EnvironmentProblem(f"--rdzv-conf {each.name}={getattr(self, each.name):g}: seconds are above 0")
        if self.silent < 3 * self.beat:
            raise EnvironmentProblem(
                f"--rdzv-conf silent={self.silent:g} with beat={self.beat:g}: a beat that is late would count as "
                f"silence\nhint: give at least silent={3 * self.beat:g}"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Times:
        """Read what `--rdzv-conf` says. Raises EnvironmentProblem for what is no time of these."""
        known = {each.name for each in fields(cls)}
        if unknown := set(given) - known:
            raise EnvironmentProblem(f"--rdzv-conf has {sorted(unknown)}\nhint: it takes {', '.join(sorted(known))}")
        try:
            return cls(**{name: float(value) for name, value in given.items() if name in known})
        except ValueError as error:
            raise EnvironmentProblem(f"--rdzv-conf: {error}; times are numbers of seconds") from error


class _Shared:
    """A connection to the store, and the one value in it; its calls never block for long."""

    def __init__(self, store: TCPStore, run_id: str) -> None:
        self.store, self._root = store, f"hetu_fx/{run_id}"
        self._key, self._lock = f"{self._root}/membership", threading.Lock()

    def check_job(self, job: str) -> None:
        """Raise RendezvousStateError where the store is another job's."""
        with self._lock:
            found = self.store.compare_set("hetu_fx/job", "", job).decode()
        if found != job:
            raise RendezvousStateError(
                f"the rendezvous is of another job: it is for {found!r}, this node has {job!r} (hetu_fx, --rdzv-id, "
                f"digest of {SECRET})\nhint: give all nodes of a job the same, and each job an endpoint of its own"
            )

    def open(self, first: Membership) -> None:
        """Write the first value, where there is none."""
        with self._lock:
            self.store.compare_set(self._key, "", first.to_json())

    def read(self) -> Membership:
        """Return the value."""
        with self._lock:
            return Membership.from_json(self.store.get(self._key).decode())

    def beat(self, node: str, others: tuple[str, ...]) -> tuple[Membership, dict[str, int]]:
        """Count up a node's beats; return the value, and the others' counts."""
        with self._lock:
            self.store.add(f"{self._root}/beat/{node}", 1)
            text, *counts = self.store.multi_get([self._key, *(f"{self._root}/beat/{other}" for other in others)])
        return Membership.from_json(text.decode()), dict(zip(others, map(int, counts), strict=True))

    def change(self, make: Callable[[Membership], Membership | None]) -> Membership:
        """Change the value by compare-and-set; return it. None of `make` leaves it as it is."""
        while True:
            with self._lock:
                old = self.store.get(self._key).decode()
                known = Membership.from_json(old)
                made = make(known)
                if made is None or made == known:
                    return known
                text = made.to_json()
                if self.store.compare_set(self._key, old, text).decode() == text:
                    return made

    def part(self, number: int) -> PrefixStore:
        """Return the part of the store that the agents of a round use, over a connection of its own."""
        return PrefixStore(f"{self._root}/round/{number}", self.store.clone())


class HetuRendezvous(RendezvousHandler):
    """A node's side.

    Args:
        parameters: as torchelastic gives them; `config` has `Times`.

    Raises:
        RendezvousConnectionError: nobody serves the endpoint.
        RendezvousStateError: it is of another job, or of another version of hetu_fx.
        EnvironmentProblem: an endpoint or a time is none.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id, self._times = parameters.run_id, Times.of(parameters.config)
        self._least, self._most = parameters.min_nodes, parameters.max_nodes
        host, port = endpoint(parameters.endpoint)
        self._where = f"{host}:{port}"
        address = parameters.local_addr or _own_address(host)
        self._me = Member(f"{node_name()}-{os.getpid()}-{secrets.token_hex(3)}", address)
        self._served = _serve(host, port, address, self._times)
        store = self._served or _connect(host, port, self._times)
        self._shared = _Shared(store, self._run_id)
        self._shared.check_job(f"hetu_fx {_VERSION}, id {self._run_id!r}, secret {_digest()}")
        if self._served is not None:
            self._shared.open(Membership(self._me.node))
        self._workers_store: TCPStore | None = None
        self._round = 0
        self._listener = _Listener(self._shared, self._me.node, self._times, self._where)

    def get_backend(self) -> str:
        """Return the name by which torchrun knows it."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Tell workers to use the store of their round, which its first node's agent serves."""
        return True

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, and return this node's rank in it once it is settled.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousConnectionError: the store cannot be reached any more.
            RendezvousTimeoutError: it is not settled in time; names what it waits for.
        """
        self._listener.start()
        settled = self._settled()
        self._round = settled.number
        rank = settled.member_nodes.index(self._me.node)
        return self._info(settled, rank)

    def _settled(self) -> Membership:
        """Wait for a later round that this node is in, and settle it where nobody else has."""
        deadline, moved, seen = time.monotonic() + self._times.timeout, time.monotonic(), ()
        while time.monotonic() < deadline:
            known = self._reached(lambda: self._shared.change(self._join))
            if known.is_closed:
                raise RendezvousClosedError(f"the job {self._run_id!r} has ended; it takes no further nodes")
            if known.joined_nodes != seen:
                moved, seen = time.monotonic(), known.joined_nodes
            is_over = time.monotonic() - moved > self._times.last_call
            known = self._reached(lambda is_over=is_over: self._shared.change(self._settle(is_over)))
            if known.number > self._round and self._me.node in known.member_nodes:
                return known
            time.sleep(self._times.beat / 3)
        self._reached(lambda: self._shared.change(lambda known: known.leaving(self._me.node)))
        raise RendezvousTimeoutError(_late(known, self._least, self._times.timeout))

    def _join(self, known: Membership) -> Membership | None:
        is_in = known.number > self._round and self._me.node in known.member_nodes
        return None if is_in or known.is_closed or self._me.node in known.joined_nodes else known.joining(self._me)

    def _settle(self, is_over: bool) -> Callable[[Membership], Membership | None]:
        def settle(known: Membership) -> Membership | None:
            has_say = self._me.node in (known.electorate or known.joined_nodes)
            return known.settled(self._least, self._most, last_call_is_over=is_over) if has_say else None

        return settle

    def _reached(self, ask: Callable[[], Membership]) -> Membership:
        try:
            return ask()
        except RuntimeError as error:
            raise RendezvousConnectionError(f"the rendezvous at {self._where} cannot be reached: {error}") from error

    def _info(self, settled: Membership, rank: int) -> RendezvousInfo:
        """Return what torchelastic needs of a round; its first node serves the store of its workers."""
        store, port = self._shared.part(settled.number), None
        self._workers_store = None
        if rank == 0:
            served = serve_store(self._me.address, 0, timedelta(seconds=self._times.timeout))
            self._workers_store, port = served, served.port
        info = RendezvousStoreInfo.build(rank, store, self._me.address, port)
        names = _shown(settled.member_nodes)
        _LOG.info("round %d: %d nodes: %s; this is %d", settled.number, len(names), ", ".join(names), rank)
        return RendezvousInfo(store, rank, len(settled.members), info)

    def num_nodes_waiting(self) -> int:
        """Return for how many nodes the workers should start again: new ones, and those that are gone.

        Raises RendezvousConnectionError where the store has not been reached for long.
        """
        known = self._listener.known()
        has_read = known is not None and known.number >= self._round  # it may have read before the round was settled
        return known.waiting(self._me.node, self._most) if has_read else 0

    def is_closed(self) -> bool:
        """Tell whether the job has ended."""
        return self._reached(self._shared.read).is_closed

    def set_closed(self) -> None:
        """End the job: no node joins it any more."""
        self._reached(lambda: self._shared.change(lambda known: replace(known, is_closed=True)))

    def shutdown(self) -> bool:
        """End the job, and this node's part in it; return whether the others could be told.

        The node that serves the store waits a little for the others, which tell their end in it too.
        """
        self._listener.end()
        try:
            known = self._reached(
                lambda: self._shared.change(lambda known: replace(known.leaving(self._me.node), is_closed=True))
            )
            deadline = time.monotonic() + 2 * self._times.silent
            while self._served is not None and known.members and time.monotonic() < deadline:
                time.sleep(self._times.beat / 3)
                known = self._reached(self._shared.read)
        except RendezvousConnectionError as error:
            _LOG.warning("the end of the job could not be told: %s", error)
            return False
        return True


class _Listener:
    """A thread that shows this node's signs of life and hears the others'."""

    def __init__(self, shared: _Shared, node: str, times: Times, where: str) -> None:
        self._shared, self._node, self._times, self._where = shared, node, times, where
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._run, name=BACKEND, daemon=True)
        self._beats = Beats(times.silent)
        self._missing_since: dict[str, float] = {}
        self._known: Membership | None = None
        self._reached, self._failure = time.monotonic(), ""

    def start(self) -> None:
        """Begin, if it has not begun; returns once this node has shown a first sign of life."""
        if not self._thread.is_alive() and not self._ended.is_set():
            self._step()
            self._thread.start()

    def end(self) -> None:
        """End it, and wait until it has ended."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(self._times.silent)

    def known(self) -> Membership | None:
        """Return what was read last. Raises RendezvousConnectionError where that was too long ago."""
        silent = time.monotonic() - self._reached
        if silent > self._times.reach:
            raise RendezvousConnectionError(
                f"the rendezvous at {self._where} has not answered for {silent:.1f} s{self._failure}\n"
                "hint: look whether the machine that serves it runs, and whether the network leads there"
            )
        return self._known

    def _run(self) -> None:
        told = False
        while not self._ended.wait(self._times.beat):
            try:
                self._step()
            except RuntimeError as error:
                self._failure = f": {str(error).splitlines()[0]}"
                if not told:
                    _LOG.warning("the rendezvous at %s does not answer%s", self._where, self._failure)
                told = True
            else:
                told = False

    def _step(self) -> None:
        """Show a sign of life, and say of whom there has been none."""
        watched = self._known.watched if self._known else ()
        known, counts = self._shared.beat(self._node, watched)
        now = time.monotonic()
        self._known, self._reached, self._failure = known, now, ""
        self._beats.hear(counts, now)
        silent = {*self._beats.silent(now), *self._late(known, now)} & {*known.watched} - {self._node}
        if self._node in known.electorate and silent != {*known.silent.get(self._node, ())}:
            self._known = self._shared.change(lambda found: found.hearing(self._node, silent))

    def _late(self, known: Membership, now: float) -> list[str]:
        """Return the members that do not come to a next round although there is one, for too long."""
        missing = known.missing if known.is_forming else ()
        self._missing_since = {node: self._missing_since.get(node, now) for node in missing}
        return [node for node, since in self._missing_since.items() if now - since > self._times.come]


def endpoint(text: str) -> tuple[str, int]:
    """Return host and port of an endpoint. Raises EnvironmentProblem for what is none."""
    host, colon, port = text.strip().rpartition(":") if not text.strip().endswith("]") else (text.strip(), "", "")
    if not colon:
        host, port = text.strip(), str(DEFAULT_PORT)
    if not host or not port.isdigit() or int(port) > 65535:
        raise EnvironmentProblem(
            f"--rdzv-endpoint {text!r} is no endpoint\nhint: give one like --rdzv-endpoint 10.0.0.1:{DEFAULT_PORT}"
        )
    return host.strip("[]"), int(port)


def _own_address(host: str) -> str:
    """Return the address at which other nodes reach this one: at its end of the way to the endpoint."""
    source = Contact.own(host).source
    is_here = source.startswith("127.") or source == "::1"
    return Contact.own(_OUTSIDE).source if is_here and host not in _LOOPBACK_NAMES else source


_OUTSIDE = "192.0.2.1"  # of no machine (RFC 5737): the way there is the way to other machines


def _serve(host: str, port: int, address: str, times: Times) -> TCPStore | None:
    """Serve the store where the endpoint is an address of this machine that nobody serves yet; else None."""
    with suppress(OSError):
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        is_named_loopback = str(resolved).startswith("127.") and host not in _LOOPBACK_NAMES
        return serve_store(address if is_named_loopback else str(resolved), port, timedelta(seconds=times.timeout))
    return None


def _connect(host: str, port: int, times: Times) -> TCPStore:
    """Connect to the store at the endpoint. Raises RendezvousConnectionError where nobody serves it."""
    deadline, reason = time.monotonic() + times.reach, "no answer"
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=times.reach).close()
            return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=times.timeout))
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            time.sleep(times.beat)
    raise RendezvousConnectionError(
        f"nobody serves the rendezvous at {host}:{port}, tried for {times.reach:g} s: {reason}\n"
        "hint: start the node of that address too, or wait longer for it by --rdzv-conf reach=300"
    )


def _digest() -> str:
    """Return a digest of the job's secret; "none" without one."""
    secret = os.environ.get(SECRET, "")
    return hashlib.sha256(secret.encode()).hexdigest()[:12] if secret else "none"


def _late(known: Membership, least: int, seconds: float) -> str:
    missing = _shown(known.missing)
    waits = (
        f"members {missing} have not come" if missing else f"of at least {least} nodes {len(known.joined)} have come"
    )
    return f"no round was settled within {seconds:g} s: {waits}\nhint: look for the reason in the output of the others"


def _shown(nodes: Sequence[str]) -> list[str]:
    """Return the names of nodes as people know them."""
    return short_names([node.rsplit("-", 2)[0] for node in nodes])
