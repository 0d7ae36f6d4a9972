"""torchelastic's rendezvous by `membership`: `torchrun --rdzv-backend hetu_fx --rdzv-endpoint host:port --nnodes 1:3`.

The node at the endpoint serves the store in which the membership stands. Of several endpoints (`a,b,c`) the first one
serves it, and the next when it is gone: nodes look at all of them, and go to the store whose last round is the latest.
Each round has a store of its own for its workers, served by its first node, so that nobody reads what is left.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
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

from hetu_fx.base.machine import NODE_VARIABLE, node_name, short_names
from hetu_fx.base.torch_private import TCPStore
from hetu_fx.comm_ops.wire.rendezvous import serve_store
from hetu_fx.launch.membership import Member, Membership
from hetu_fx.launch.rendezvous_store import Endpoint, MembershipStore
from hetu_fx.launch.times import Times

BACKEND = "hetu_fx"
_LOG = logging.getLogger(__name__)
_DIAL_SECONDS = 0.5  # for each of several endpoints
_TELL_SECONDS = 5.0  # between two words of what is waited for


class HetuRendezvous(RendezvousHandler):
    """A node's side.

    Args:
        parameters: as torchelastic gives them; `config` has `Times`.

    Raises:
        RendezvousConnectionError: nobody serves an endpoint.
        RendezvousStateError: it is of another job, or of another version of hetu_fx.
        EnvironmentProblem: an endpoint or a time is none.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id, self._times = parameters.run_id, Times.of(parameters.config)
        self._endpoints = tuple(map(Endpoint.of, parameters.endpoint.split(",")))
        # Of several endpoints more than half have to be there at the start: a node that starts again while it cannot
        # reach the others begins no second job.
        self._quorum = len(self._endpoints) // 2 + 1
        self._least, self._most = parameters.min_nodes, parameters.max_nodes
        address = parameters.local_addr or self._endpoints[0].own_address()
        self._me = Member(f"{node_name()}-{os.getpid()}-{secrets.token_hex(3)}", address)
        self._reason = ""
        self._twin_since: float | None = None
        self._gone_since: float | None = None  # the store, whose node has left the job
        self._is_done = False
        self._workers_store: TCPStore | None = None
        self._settled = Membership(self._me.node)
        self._served: dict[Endpoint, TCPStore] = {}
        self._left: list[MembershipStore] = []  # those that did not answer when this node moved away from them
        self._at = self._first_store()

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

    def _first_store(self) -> MembershipStore:
        """Return the store of the job, which this node serves where it is at the first endpoint and no other is up."""
        found, served = self._latest() if len(self._endpoints) > 1 else None, None
        if found is None:
            served = self._endpoints[0].serve(self._me.address)
        if served is not None:
            return self._open(self._endpoints[0], served)
        deadline = time.monotonic() + self._times.reach
        while found is None and time.monotonic() < deadline:
            time.sleep(self._times.beat)
            found = self._latest()
        if found is None:
            raise RendezvousConnectionError(
                f"no machine serves the rendezvous at {self._endpoints[0]}, tried for {self._times.reach:g} s\n"
                "hint: start the node of that address too, or wait longer for it by --rdzv-conf reach=300"
            )
        return found

    def _open(self, where: Endpoint, served: TCPStore) -> MembershipStore:
        """Serve a store with the last round that this node knows."""
        self._served[where] = served
        last = self._settled  # before the first round nobody is known
        ended = {one.address for one in last.members if one.node == last.serves and self._at.has_ended}
        store = self._connected(served, where, ended)
        store.open(self._settled.moved(self._me.node))
        return store

    def _connected(self, store: TCPStore, where: Endpoint, ended: Collection[str] = ()) -> MembershipStore:
        times, connected = self._times, ended if where in self._served else None
        bounds = {"beat": times.beat, "silent": times.silent, "come": times.come}
        return MembershipStore(store, self._run_id, self._me.node, where, connected, **bounds)

    def _latest(self, used: MembershipStore | None = None) -> MembershipStore | None:
        """Return the first of the stores whose last round is the latest; None where none has this node's own."""
        found = list(self._numbered(used))
        best = max(found, key=lambda one: one[0], default=(0, None))[1]
        for _, store in found:
            if store is not best and store is not used:
                store.end()
        return best

    def _numbered(self, used: MembershipStore | None) -> Iterator[tuple[int, MembershipStore]]:
        """Yield the stores that are served, with the numbers of their last rounds; the one in use as it is."""
        for where in self._endpoints:
            with suppress(RendezvousConnectionError):
                is_used = used is not None and used.where == where and not used.lost
                store = used if used and is_used else self._connected(where.dial(_DIAL_SECONDS), where)
                number = store.read().number if store.has_value() else -1
                if number >= self._settled.number:
                    yield number, store
                elif store is not used:
                    store.end()

    def _move(self, waited: float) -> None:
        """Go to the store where the job goes on: the latest of those that are served; serve one where it is time to.

        Once there is none, the endpoints of machines that are there are served in turn, with what is known there, so
        that not each has its own; `waited` are the seconds for which this node has looked for one.
        """
        found = self._latest(self._at)
        others = (*self._endpoints[1:], self._endpoints[0]) if found is None and self._settled.number else ()
        for turn, where in enumerate(others):
            is_due = waited >= turn * 2 * self._times.beat and where not in self._served
            if is_due and (served := where.serve(self._me.address)) is not None:
                found = self._open(where, served)
                break
        if found is not None and found is not self._at:
            _LOG.warning("the rendezvous is at %s now, which was at %s", found.where, self._at.where)
            is_silent = self._at.is_silent
            self._at.end(waits=not is_silent)
            if is_silent:
                self._left.append(self._at)
            self._at = found
            # One that was served before has an old round, and its address is served anew when it is needed.
            self._served = {at: store for at, store in self._served.items() if at == found.where}

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, and return this node's rank in it once it is settled.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousConnectionError: no store can be reached any more.
            RendezvousTimeoutError: it is not settled in time; names what it waits for.
        """
        wait = self.new_wait()
        while (settled := self.attempt(wait)) is None:
            time.sleep(self.pause)
        return self._info(settled)

    # What `hetu-fx launch` uses of it, which waits for nothing.

    @property
    def pause(self) -> float:
        """Return the seconds between two attempts."""
        return self._times.beat / 3

    @property
    def address(self) -> str:
        """Return the address at which the others reach this machine."""
        return self._me.address

    @property
    def name(self) -> str:
        """Return the name of this machine as people know it."""
        return _shown([self._me.node])[0]

    def describe(self, known: Membership) -> dict[str, Any]:
        """Say what the processes of this node need to know of a round."""
        first, me = known.members[0], self._me.node
        return {
            "first_rank": known.first_rank(me),
            "world": known.world,
            "address": first.address,
            "port": first.port,
            "node": known.member_nodes.index(me),
            "nodes": _shown(known.member_nodes),
            "own_port": self._me.port,
        }

    def new_wait(self, workers: int = 0, port: int = 0, reason: str = "") -> _RoundWait:
        """Want to be in the next round, with that many processes and a store at a port; see `Membership.joining`."""
        self._me, self._reason = replace(self._me, workers=workers, port=port), reason
        self._is_done = False
        return _RoundWait(self._times)

    def attempt(self, wait: _RoundWait) -> Membership | None:
        """Join the next round, and return it if it is settled. Raises as `next_rendezvous` does."""
        try:
            known = self._try_round(wait)
            reason = _waits_for(known, self._least_of(known))
            if self._is_in(known):
                self._settled = known
                return known
        except RendezvousConnectionError as error:
            reason = str(error)
        if wait.is_long:
            _LOG.warning("still waiting for a round of the job: %s", reason)
        if self._at.lost or wait.is_slow:
            self._move(wait.seconds)
        if wait.is_over:
            with suppress(RendezvousConnectionError):
                self._at.change(lambda known: known.leaving(self._me.node))
            raise RendezvousTimeoutError(
                f"no round was settled within {self._times.timeout:g} s: {reason}\n"
                "hint: look for the reason in the output of the others"
            )
        return None

    def has_twin(self) -> bool:
        """Tell whether a node of this one's name is in the job: one that died is there until it is missed.

        Raises RendezvousStateError, and tells the others, if it lives.
        """
        known, own = self._at.known, _machine(self._me.node)
        if self._at.lost or self._settled.number:
            return False
        if known is None:  # nothing has been read so far
            return True
        twins = {node for node in known.watched if _machine(node) == own} - {self._me.node} - known.evicted
        self._twin_since = (self._twin_since or time.monotonic()) if twins else None
        waits = 0.0 if self._twin_since is None else time.monotonic() - self._twin_since
        if waits > 3 * self._times.silent and not twins & self._at.silent:
            self._at.refuse(f"{self.address} has the name of a machine of the job, {self.name!r}")
            raise RendezvousStateError(
                f"a machine of the job has the name {self.name!r} already, which this one at {self.address} has too\n"
                f"hint: run hetu-fx launch once on each machine, and give each a {NODE_VARIABLE} of its own"
            )
        return bool(twins)

    def news(self) -> tuple[str, str]:
        """Say what is to be done about the round under way, and why.

        It is "lost" if the processes must leave it at once, "join" if at a step's end, "closed" if the job is over, and
        "" if it goes on.
        """
        known, me = self._at.known, self._me.node
        if self._at.lost:
            return self._news_without_store()
        if known is None or known.number < self._settled.number:
            return "", ""
        gone = [node for node in known.member_nodes if node in known.evicted]
        if known.is_over:
            return "closed", known.reason
        if me not in known.member_nodes or me in gone:
            return "lost", "the other machines take this one for gone"
        if gone or known.reason:
            return "lost", known.reason or f"machines {_shown(gone)} are gone"
        if not known.can_put_out({*known.member_nodes} - self._at.silent):  # the network may be cut around the store
            return "lost", f"machines {_shown(sorted(self._at.silent))} do not answer, and may continue elsewhere"
        return ("join", "") if known.waiting(me, self._most) else ("", "")

    def _news_without_store(self) -> tuple[str, str]:
        """Say what `news` does where the store is gone.

        Where its node has left the job at a step's end, which is not in the round under way, that goes on, and this
        node goes to where another one serves the store. Where none can, its processes end the job as they are done.
        """
        known = self._at.known
        last = self._settled if known is None or known.number < self._settled.number else known
        if not last.has_store_left:
            return "lost", f"the rendezvous at {self._at.where} is gone: {self._at.lost}"
        self._gone_since = self._gone_since or time.monotonic()
        waited = time.monotonic() - self._gone_since
        self._move(waited)
        if not self._at.lost:
            self._gone_since = None
            if self._is_done:
                self.finish()
        return ("closed", "") if self._is_done and self._at.lost and waited > self._times.reach else ("", "")

    def why_closed(self) -> str:
        """Return why the job has ended; "" if its work is done."""
        with suppress(RendezvousConnectionError):
            return self._at.read().reason
        return f"the rendezvous at {self._at.where} is gone: {self._at.lost}"

    def finish(self) -> None:
        """Tell that the work of this node's processes is done."""
        self._is_done = True
        self._at.change(lambda known: known.finishing(self._me.node))

    def leave(self, reason: str, *, closes: bool) -> None:
        """End this node's part in the job, which ends if `closes`; for the reason see `Membership.leaving`.

        The node that serves the store waits a little: for the others to tell their end, or to go on without it.
        """
        try:
            self._leave(reason, closes)
        finally:
            for store in (*self._left, self._at):
                store.end()

    def _leave(self, reason: str, closes: bool) -> None:
        me = self._me.node
        known = self._at.change(lambda known: known.closing(me, reason) if closes else known.leaving(me, reason))
        number, seconds = known.number, 2 * self._times.silent if known.is_over else self._times.reach
        deadline = time.monotonic() + seconds
        while self._at.where in self._served and known.members and known.number == number:
            if time.monotonic() > deadline:
                break
            time.sleep(self.pause)
            known = self._at.read()
        if known.number != number:  # the others read here which round they are in
            time.sleep(self._times.silent)

    def _try_round(self, wait: _RoundWait) -> Membership:
        """Join the next round, and settle it where that can be; return what is known."""
        known = self._at.change(self._join)
        if known.is_over:
            raise RendezvousClosedError(f"the job {self._run_id!r} has ended; it takes no further nodes")
        wait.see(known)
        return self._at.change(self._settle(wait))

    def _join(self, known: Membership) -> Membership | None:
        is_there = self._is_in(known) or known.is_over or self._me in known.joined
        return None if is_there else known.joining(self._me, self._reason)

    def _is_in(self, known: Membership) -> bool:
        return known.number > self._settled.number and self._me in known.members

    def _settle(self, wait: _RoundWait) -> Callable[[Membership], Membership | None]:
        def settle(known: Membership) -> Membership | None:
            if self._me.node not in known.electorate and known.members:
                return None
            found = known.without_missing() if wait.is_alone else known
            return found.settled(self._least_of(known), self._most, last_call_is_over=wait.last_call_is_over)

        return settle

    def _least_of(self, known: Membership) -> int:
        return self._least if known.number else max(self._least, self._quorum)

    def _info(self, settled: Membership) -> RendezvousInfo:
        """Return what torchelastic needs of a round; its first node serves the store of its workers."""
        rank, store, port = settled.member_nodes.index(self._me.node), self._at.part(settled.number), None
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

        A store that is gone counts as a node: the workers are started where the job goes on.
        """
        known = self._at.known
        if known is not None and known.is_over:
            return 0
        if self._at.lost:
            kind, reason = self._news_without_store()
            if kind == "lost":
                _LOG.warning("%s", reason)
            return int(kind == "lost")
        if known is None or known.number < self._settled.number:  # read before the round was settled
            return 0
        return known.waiting(self._me.node, self._most)

    def is_closed(self) -> bool:
        """Tell whether the job has ended."""
        return self._at.read().is_closed

    def set_closed(self) -> None:
        """End the job: no node joins it any more."""
        self._at.change(lambda known: replace(known, is_closed=True))

    def shutdown(self) -> bool:
        """End the job, and this node's part in it; return whether the others could be told."""
        try:
            self.leave("", closes=True)
        except RendezvousConnectionError as error:
            _LOG.warning("the other machines may not know that the job has ended: %s", error)
            return False
        return True


class _RoundWait:
    """For how long a round has been waited for, and since when nobody came to it."""

    def __init__(self, times: Times) -> None:
        self._times, self._start = times, time.monotonic()
        self._moved, self._told = self._start, self._start
        self._joined: tuple[str, ...] = ()

    def see(self, known: Membership) -> None:
        """Take note of who has joined."""
        if known.joined_nodes != self._joined:
            self._moved, self._joined = time.monotonic(), known.joined_nodes

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def is_over(self) -> bool:
        return self.seconds > self._times.timeout

    @property
    def last_call_is_over(self) -> bool:
        return time.monotonic() - self._moved > self._times.last_call

    @property
    def is_slow(self) -> bool:
        """Tell whether it has taken so long that the job may go on elsewhere."""
        return self.seconds > 2 * self._times.silent

    @property
    def is_alone(self) -> bool:
        """Tell whether to go on without those that have not come."""
        return time.monotonic() - self._moved > self._times.alone_after

    @property
    def is_long(self) -> bool:
        """Tell, once in a while, whether to say what is waited for."""
        now = time.monotonic()
        if now - self._told < _TELL_SECONDS:
            return False
        self._told = now
        return True


def _waits_for(known: Membership, least: int) -> str:
    missing = _shown(known.missing)
    if missing:
        return f"members {missing} have not come, and too few of the last round are here to continue without them"
    return f"{len(known.joined)} of at least {least} nodes came"


def _shown(nodes: Sequence[str]) -> list[str]:
    """Return the names of nodes as people know them."""
    return short_names(list(map(_machine, nodes)))


def _machine(node: str) -> str:
    """Return the name of the machine of a node."""
    return node.rsplit("-", 2)[0]
