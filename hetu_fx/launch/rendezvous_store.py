"""The store in which a job's `Membership` stands: who serves it, and a connection that never waits for it for long.

It is at one address, and what is in it is text: torch's own rendezvous keeps a pickle there, which runs code of whoever
reaches the port.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError

from hetu_fx.base.addresses import ANYWHERE, LOOPBACK_NAMES, Contact, is_loopback
from hetu_fx.base.torch_private import PrefixStore, TCPStore, connected_anew
from hetu_fx.comm_ops.wire.rendezvous import serve_store
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.launch.membership import Beats, Membership

SECRET = "HETU_FX_SECRET"
"""Of the environment: a word that all nodes of a job have, so that none joins another job by mistake."""

DEFAULT_PORT = 29400
_LOG = logging.getLogger(__name__)
_LOOPBACK_NAMES = (*LOOPBACK_NAMES, "::1")
_STORE_SECONDS = 600.0
_SUSPICIOUS = 3  # times as often as else a node looks while one is suspected
_REFUSED = "hetu_fx/refused"  # the last node that was
_CONNECTIONS = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
_ESTABLISHED = "01"  # linux/tcp_states.h

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a store is served."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, text: str) -> Endpoint:
        """Read `host`, `host:port` or `[address]:port`. Raises EnvironmentProblem for what is none."""
        host, colon, port = text.strip().rpartition(":") if not text.strip().endswith("]") else ("", "", "")
        if not colon:
            host, port = text.strip(), str(DEFAULT_PORT)
        if not host or not port.isdigit() or int(port) > 65535:
            raise EnvironmentProblem(
                f"--rdzv-endpoint {text!r} is no endpoint\nhint: give one like --rdzv-endpoint 10.0.0.1:{DEFAULT_PORT}"
            )
        return cls(host.strip("[]"), int(port))

    def own_address(self) -> str:
        """Return the address at which other nodes reach this one: at its end of the way there."""
        source = Contact.own(self.host).source
        is_named = is_loopback(source) and self.host not in _LOOPBACK_NAMES
        return Contact.own(ANYWHERE).source if is_named else source

    def serve(self, address: str) -> TCPStore | None:
        """Serve the store where this is an address of this machine that nobody serves yet; else None.

        A name that stands for the loopback on its own machine, as Debian has it, is served at `address`.
        """
        with suppress(OSError):
            found = str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0])
            is_named = found.startswith("127.") and self.host not in _LOOPBACK_NAMES
            return serve_store(address if is_named else found, self.port, timedelta(seconds=_STORE_SECONDS))
        return None

    def dial(self, seconds: float) -> TCPStore:
        """Connect to the store that is served here. Raises RendezvousConnectionError where nobody does."""
        try:
            socket.create_connection((self.host, self.port), timeout=seconds).close()
            return TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))
        except (OSError, RuntimeError) as error:
            raise RendezvousConnectionError(f"{self}: {str(error).splitlines()[0]}") from error


def job_name(run_id: str) -> str:
    """Return what all nodes of a job have in common: version, id, and a digest of the secret."""
    secret = os.environ.get(SECRET, "")
    digest = hashlib.sha256(secret.encode()).hexdigest()[:12] if secret else "none"
    return f"hetu_fx {metadata.version('hetu-fx')}, id {run_id!r}, secret {digest}"


def _connected_to(port: int) -> set[str]:
    """Return the addresses that are connected to a port of this machine, where the kernel lists connections."""
    found = set()
    for line in (line for table in _CONNECTIONS if table.exists() for line in table.read_text().splitlines()[1:]):
        _, here, there, state, *_ = line.split()
        if state == _ESTABLISHED and int(here.rpartition(":")[2], 16) == port:
            words = there.partition(":")[0]  # in hex, each in this machine's order of bytes
            numbers = (int(words[at : at + 8], 16) for at in range(0, len(words), 8))
            address = ipaddress.ip_address(struct.pack(f"={len(words) // 8}I", *numbers))
            found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


class MembershipStore:
    """A node's connection to the store: it shows its signs of life there, hears the others', and changes the value.

    A thread does all of it, one after another; whoever asks it waits `silent` seconds at the most.

    The node that serves the store sees connections end: those of a machine whose processes are killed do, those over a
    link that is cut do not. It tells so, and for a member without any two missed beats are silence. Each node hears
    that by itself, and as many are needed to put a member out.

    Args:
        store: served by this node or dialled.
        run_id: of the job.
        node: this one's name.
        where: the store is.
        beat: seconds between signs of life.
        silent: seconds without one after which a node counts as gone.
        come: seconds within which a member must come to a next round.
        connected: if this node serves the store, addresses that were connected to one that it takes the place of; else
            None.

    Attributes:
        silent: the nodes of which this one has heard nothing for so long.
        has_ended: whether the store's own side has ended the connection.

    Raises:
        RendezvousStateError: the store is another job's.
        RendezvousConnectionError: it does not answer.
    """

    def __init__(
        self, store: TCPStore, run_id: str, node: str, where: Endpoint, connected: Collection[str] | None = None,
        *, beat: float, silent: float, come: float,
    ) -> None:  # fmt: skip
        self._store, self._node, self.where = store, node, where
        self._beat, self._silent, self._come = beat, silent, come
        self._root, self._beats = f"hetu_fx/{run_id}", Beats(silent, 2 * beat)
        self._connected = None if connected is None else {*connected}
        self._suspected, self._suspected_key = list[str](), f"{self._root}/suspected"
        self._missing_since: dict[str, float] = {}
        self._known: Membership | None = None
        self.silent: frozenset[str] = frozenset()
        self._failure, self._refused, self._ended, self.has_ended = "", "", threading.Event(), False
        self._answered = time.monotonic()
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hetu_fx rendezvous", daemon=True)
        self._thread.start()
        self._check_job(job_name(run_id))

    def _check_job(self, own: str) -> None:
        found = self._ask(lambda: self._store.compare_set("hetu_fx/job", "", own).decode())
        if found != own:
            with suppress(RendezvousConnectionError):
                self.refuse(f"a node of another job: {self._node} has {own}")
            self.end()
            raise RendezvousStateError(
                f"the rendezvous at {self.where} is of another job: it is for {found}; this node has {own} (version, "
                f"--rdzv-id, digest of {SECRET})\nhint: give all nodes of a job the same, and each job its own endpoint"
            )

    def refuse(self, why: str) -> None:
        """Tell the others that a node is refused."""
        self._ask(lambda: self._store.set(_REFUSED, why))

    def open(self, first: Membership) -> None:
        """Write the first value, where there is none, and no signs of life of its members."""

        def write() -> None:
            self._store.set(_REFUSED, "")
            self._store.set(self._suspected_key, "[]")
            for node in first.watched:
                self._store.add(self._count_of(node), 0)
            self._store.compare_set(self._key, "", first.to_json())

        self._ask(write)

    @property
    def _key(self) -> str:
        return f"{self._root}/membership"

    def _count_of(self, node: str) -> str:
        return f"{self._root}/beat/{node}"

    def read(self) -> Membership:
        """Return the value."""
        return self._ask(lambda: Membership.from_json(self._store.get(self._key).decode()))

    def has_value(self) -> bool:
        """Tell whether its server has written the first value already."""
        return self._ask(lambda: self._store.check([self._key]))

    def change(self, make: Callable[[Membership], Membership | None]) -> Membership:
        """Change the value by compare-and-set; return it. None of `make` leaves it as it is."""
        while True:
            made = self._ask(lambda: self._changed(make))
            if made is not None:
                return made

    def _changed(self, make: Callable[[Membership], Membership | None]) -> Membership | None:
        """Return the value, changed; None where another node was faster."""
        old = self._store.get(self._key).decode()
        known = Membership.from_json(old)
        made = make(known)
        if made is None or made == known:
            return known
        self._store.add(self._count_of(self._node), 1)  # nobody waits for the count of one who is not there
        text = made.to_json()
        return made if self._store.compare_set(self._key, old, text).decode() == text else None

    def part(self, number: int) -> PrefixStore:
        """Return the part of the store that the agents of a round use, over a connection of its own."""
        return PrefixStore(f"{self._root}/round/{number}", connected_anew(self._store))

    @property
    def known(self) -> Membership | None:
        """Return what was read last."""
        return self._known

    @property
    def lost(self) -> str:
        """Return why the store counts as gone; "" where it does not."""
        silent = time.monotonic() - self._answered
        if self._ended.is_set():
            return "this node has left it"
        return self._failure or (f"no answer for {silent:.1f} s" if silent > 2 * self._silent else "")

    @property
    def is_silent(self) -> bool:
        """Tell whether a call of the store does not return: its side is there no longer, and has not ended."""
        return bool(self.lost) and not self.has_ended

    def end(self, *, waits: bool = True) -> None:
        """Show no further signs of life, and answer nothing any more.

        The thread may be in a call of a store that does not answer. It must be waited for before the interpreter ends,
        as such a call would take the process down.
        """
        self._ended.set()
        self._asked.put(lambda: None)
        self._thread.join(2 * self._silent if waits else 0.0)

    def _ask(self, call: Callable[[], T]) -> T:
        """Have the thread do something; return what comes of it. Raises RendezvousConnectionError without an answer."""
        answer: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def answered() -> None:
            try:
                answer.put((call(), None))
            except Exception as error:  # the thread goes on; whoever has asked is told
                answer.put((None, error))

        if self.lost:
            raise RendezvousConnectionError(f"the rendezvous at {self.where} is gone: {self.lost}")
        self._asked.put(answered)
        try:
            found, error = answer.get(timeout=2 * self._silent)
        except queue.Empty:
            self._failure = f"no answer within {2 * self._silent:g} s"
            raise RendezvousConnectionError(f"the rendezvous at {self.where} gives {self._failure}") from None
        if isinstance(error, RuntimeError):
            self._fail(error)
            raise RendezvousConnectionError(f"the rendezvous at {self.where} is gone: {self._failure}") from error
        if error is not None:
            raise error
        return found  # type: ignore[return-value]  # None is what it has found

    def _run(self) -> None:
        due = time.monotonic()
        while not self._failure and not self._ended.is_set():
            try:
                self._asked.get(timeout=max(0.0, due - time.monotonic()))()
                self._answered = time.monotonic()
            except queue.Empty:
                due = time.monotonic() + self._beat / (_SUSPICIOUS if self._suspected else 1)
                self._show_and_hear()

    def _show_and_hear(self) -> None:
        """Show a sign of life, and say of whom there has been none."""
        try:
            if self._known is not None or self._store.check([self._key]):
                self._step()
            self._answered = time.monotonic()
        except RuntimeError as error:
            self._fail(error)

    def _fail(self, error: RuntimeError) -> None:
        self._failure, self.has_ended = str(error).splitlines()[0], True

    def _step(self) -> None:
        watched = self._known.watched if self._known else ()
        self._store.add(self._count_of(self._node), 1)
        keys = [self._key, _REFUSED, self._suspected_key, *map(self._count_of, watched)]
        text, refused, suspected, *counts = self._store.multi_get(keys)
        self._warn_of(refused.decode())
        known, now = Membership.from_json(text.decode()), time.monotonic()
        self._known, self._suspected = known, json.loads(suspected)
        self._suspect(known)
        self._beats.hear(dict(zip(watched, map(int, counts), strict=True)), now)
        self.silent = frozenset(self._beats.silent(now, self._suspected))
        silent = {*self.silent, *self._late(known, now)} & {*known.watched} - {self._node}
        if self._node in known.electorate and silent != {*known.silent.get(self._node, ())}:
            self._known = self._changed(lambda found: found.hearing(self._node, silent)) or known

    def _suspect(self, known: Membership) -> None:
        """Tell which members have no connection any more, if this node serves the store."""
        if self._connected is None:
            return
        there = _connected_to(self._store.port)
        self._connected |= there
        gone = [one.node for one in known.members if one.address in self._connected - there]
        if gone != self._suspected:
            self._suspected = gone
            self._store.set(self._suspected_key, json.dumps(gone))

    def _warn_of(self, refused: str) -> None:
        """Say once that a node was refused."""
        if refused != self._refused:
            self._refused = refused
            _LOG.warning("a node was refused by the rendezvous at %s: %s", self.where, refused)

    def _late(self, known: Membership, now: float) -> Collection[str]:
        """Return the members that do not come to a next round although there is one, for too long."""
        missing = known.missing if known.is_forming else ()
        self._missing_since = {node: self._missing_since.get(node, now) for node in missing}
        return [node for node, since in self._missing_since.items() if now - since > self._come]
