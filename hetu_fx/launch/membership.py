"""Which nodes are in a job, as one value that all of them change by compare-and-set: pure, without clock or network.

A job goes through rounds. Nodes join the next one, which is settled once every member of the last is accounted for: it
has joined too, has left, or is silent for more than half of those members. So a node that comes anew never puts
anybody out, whatever it takes others for; torch's own rendezvous lets it (seen in torch 2.13: two jobs side by side).
Half of them suffice where one of that half served the store when the round was settled, so the store's side of two
nodes goes on alone. Another node may serve what it knew last once that store is gone (`moved`): the same rule holds
there, so of two stores at the most one has the members that it takes to settle a round.

A member that was put out finds a later round without itself, and joins again as anybody does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from hetu_fx.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Member:
    """A node of a job.

    Attributes:
        node: a name that it alone has.
        address: at which the others reach it.
        workers: how many processes it brings; 0 where the launcher tells that elsewhere (torchrun).
        port: of the store that it serves for the workers of a round in which it is the first node; 0 as above.
    """

    node: str
    address: str
    workers: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        if not self.node or not self.address:
            raise ClusterError(f"a node needs a name and an address; got {self.node!r} at {self.address!r}")
        if self.workers < 0 or not 0 <= self.port < 1 << 16:
            raise ClusterError(f"node {self.node!r} has {self.workers} processes and a store at port {self.port}")

    @classmethod
    def of(cls, node: object, address: object = "", workers: int = 0, port: int = 0) -> Member:
        """Read what was written of it."""
        return cls(str(node), str(address), int(workers), int(port))


@dataclass(frozen=True, slots=True)
class Membership:
    """The nodes of a job.

    Attributes:
        host: of the members of the last round, the one that served the store when that was settled; the first of them
            where none did, as the node that serves it leaves. Before the first round, the node that serves it.
        number: of the round that was settled last; 0 before the first.
        members: of that round, in the order of their ranks.
        joined: those that want to be in the next one, in the order in which they came.
        silent: whom each member of the last round has not heard for too long; before the first, whom those that joined.
        is_closed: whether there will be no further round.
        server: the node that serves the store now; "" where that is the host.
        done: the members whose work in this round is done.
        reason: why the round, or the job if it is closed, ends out of order, as a member has said; else "".

    Raises ClusterError where a node stands twice, or nodes are accused by one that has no say.
    """

    host: str
    number: int = 0
    members: tuple[Member, ...] = ()
    joined: tuple[Member, ...] = ()
    silent: Mapping[str, frozenset[str]] = field(default_factory=dict, hash=False)
    is_closed: bool = False
    server: str = ""
    done: frozenset[str] = frozenset()
    reason: str = ""

    def __post_init__(self) -> None:
        for nodes in (self.member_nodes, self.joined_nodes):
            if len(nodes) != len(set(nodes)):
                raise ClusterError(f"a node stands twice in {list(nodes)}")
        if self.members and not self.number:
            raise ClusterError(f"nodes {list(self.member_nodes)} are members before the first round")
        if self.done - {*self.member_nodes}:
            raise ClusterError(f"nodes {sorted(self.done)} are done, of members {list(self.member_nodes)}")
        if strangers := set(self.silent) - {*self.electorate}:
            raise ClusterError(f"nodes {sorted(strangers)} have no say about members {list(self.electorate)}")

    @property
    def member_nodes(self) -> tuple[str, ...]:
        """Return the names of the members."""
        return tuple(member.node for member in self.members)

    @property
    def joined_nodes(self) -> tuple[str, ...]:
        """Return the names of those that want to be in the next round."""
        return tuple(member.node for member in self.joined)

    @property
    def serves(self) -> str:
        """Return the node that serves the store."""
        return self.server or self.host

    @property
    def has_store_left(self) -> bool:
        """Tell whether the node that serves the store has left the job: the round goes on without that."""
        return bool(self.members) and self.serves not in self.member_nodes

    @property
    def electorate(self) -> tuple[str, ...]:
        """Return the nodes whose word counts about who is silent."""
        return self.member_nodes or self.joined_nodes

    @property
    def watched(self) -> tuple[str, ...]:
        """Return the nodes whose beats matter."""
        return tuple(dict.fromkeys((*self.member_nodes, *self.joined_nodes)))

    @property
    def evicted(self) -> frozenset[str]:
        """Return the nodes that are put out: silent for more than half of those with a say, or half with the host."""
        accusers = {node: {by for by, silent in self.silent.items() if node in silent} for node in self.watched}
        return frozenset(node for node, found in accusers.items() if self.can_put_out(found - {node}))

    def can_put_out(self, accusers: Collection[str]) -> bool:
        """Tell whether these are enough to go on without the others."""
        twice, all_of_them = 2 * len(accusers), len(self.electorate)
        return twice > all_of_them or (twice == all_of_them > 0 and self.host in accusers)

    @property
    def is_over(self) -> bool:
        """Tell whether there will be no further round: the job is closed, or the work of all members is done."""
        return self.is_closed or (bool(self.members) and {*self.member_nodes} <= self.done)

    @property
    def world(self) -> int:
        """Return the number of processes of the last round."""
        return sum(member.workers for member in self.members)

    def first_rank(self, node: str) -> int:
        """Return the rank of the first process of a member."""
        return sum(member.workers for member in self.members[: self.member_nodes.index(node)])

    @property
    def newcomers(self) -> tuple[str, ...]:
        """Return the nodes that want to be in the next round, are there, and are not members."""
        known = {*self.member_nodes, *self.evicted}
        return tuple(node for node in self.joined_nodes if node not in known)

    @property
    def is_forming(self) -> bool:
        """Tell whether a member wants a next round, or one of them is put out: all others must join it."""
        return bool({*self.joined_nodes} & {*self.member_nodes} or self.evicted & {*self.member_nodes})

    def waiting(self, node: str, most: int) -> int:
        """Return for how many nodes a member should leave its round: 0 where it is to go on.

        Args:
            node: the member.
            most: how many nodes the job may have; newcomers for whom there is no place wait.
        """
        if node not in self.member_nodes:
            return 1
        if self.is_forming:
            return max(1, len(self.newcomers))
        return min(len(self.newcomers), most - len(self.members)) if len(self.members) < most else 0

    def joining(self, member: Member, reason: str = "") -> Membership:
        """Return it with a node in the next round; what others took for its silence is forgotten.

        Args:
            member: the node.
            reason: why it leaves the last one before its end; of a newcomer that says nothing.
        """
        others = tuple(one for one in self.joined if one.node != member.node)
        heard = {by: silent - {member.node} for by, silent in self.silent.items()}
        why = self.reason or (reason if member.node in self.member_nodes else "")
        known = replace(self, joined=(*others, member), silent=_without_empty(heard))
        return replace(known, done=self.done - {member.node}, reason=why)

    def finishing(self, node: str) -> Membership:
        """Return it with the work of a member done."""
        return replace(self, done=(self.done | {node}) & {*self.member_nodes})

    def leaving(self, node: str, reason: str = "") -> Membership:
        """Return it without a node in the next round, which says so itself; why, if it is before a step's end."""
        joined = tuple(one for one in self.joined if one.node != node)
        members = tuple(one for one in self.members if one.node != node)
        silent = {by: found - {node} for by, found in self.silent.items() if by != node}
        why = self.reason or (reason if node in self.member_nodes else "")
        known = replace(self, joined=joined, members=members, silent=_without_empty(silent), done=self.done - {node})
        return replace(known, reason=why)

    def closing(self, node: str, reason: str = "") -> Membership:
        """Return it without a node that ends the job, and says why if the work is not done."""
        known = self.leaving(node)
        return replace(known, is_closed=True, reason=reason or known.reason)

    def moved(self, server: str) -> Membership:
        """Return what a node that begins to serve the store knows: the last round, and who was host of it."""
        return Membership(self.host, self.number, self.members, server=server)

    def without_missing(self) -> Membership:
        """Return it with all members put out that have not joined: for one who knows that they are gone."""
        members = tuple(one for one in self.members if one.node not in self.missing)
        return replace(self, members=members, silent={}, done=self.done - {*self.missing})

    def hearing(self, node: str, silent: Collection[str]) -> Membership:
        """Return it with whom a node takes for silent now; its word counts only where it has a say."""
        if node not in self.electorate:
            return self
        found = {**self.silent, node: frozenset(silent) & {*self.watched} - {node}}
        return replace(self, silent=_without_empty(found))

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the members that have neither joined the next round nor are put out."""
        known = {*self.joined_nodes, *self.evicted}
        return tuple(node for node in self.member_nodes if node not in known)

    def settled(self, least: int, most: int, *, last_call_is_over: bool) -> Membership | None:
        """Return it with the next round settled; None where that has to wait.

        Members come first, in their order, then newcomers in the order in which they came; those for whom there is no
        place wait. The first round waits for the last call, and for the host: members that leave it alone with a
        newcomer's rights would leave nobody who could put them out. Others wait for nobody but their members.

        Args:
            least: how many nodes the job needs.
            most: how many it may have.
            last_call_is_over: whether nobody has come for so long that the first round need not wait.
        """
        ready = [one for one in self.joined if one.node not in self.evicted]
        if self.is_over or self.missing or len(ready) < least:
            return None
        if not self.members and (self.host not in self.joined_nodes or (not last_call_is_over and len(ready) < most)):
            return None
        order = {node: at for at, node in enumerate(self.member_nodes)}
        ready.sort(key=lambda one: order.get(one.node, len(order)))
        members = tuple(ready[:most])
        is_host = any(one.node == self.serves for one in members)
        host, server = (self.serves, "") if is_host else (members[0].node, self.serves)
        return Membership(host, self.number + 1, members, tuple(ready[most:]), server=server)

    def to_json(self) -> str:
        """Write it as one line of JSON."""
        record = {
            "host": self.host,
            "number": self.number,
            "members": list(map(astuple, self.members)),
            "joined": list(map(astuple, self.joined)),
            "silent": {by: sorted(found) for by, found in sorted(self.silent.items())},
            "is_closed": self.is_closed,
            "server": self.server,
            "done": sorted(self.done),
            "reason": self.reason,
        }
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> Membership:
        """Read what `to_json` has written. Raises ClusterError for what is none."""
        try:
            return cls._of(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ClusterError(f"{text[:200]!r} says not who is in the job: {error!r}") from error

    @classmethod
    def _of(cls, record: dict[str, Any]) -> Membership:
        members, joined = (tuple(Member.of(*one) for one in record[name]) for name in ("members", "joined"))
        silent = {str(by): frozenset(map(str, found)) for by, found in record["silent"].items()}
        ends = (
            bool(record["is_closed"]),
            str(record["server"]),
            frozenset(map(str, record["done"])),
            str(record["reason"]),
        )
        return cls(str(record["host"]), int(record["number"]), members, joined, silent, *ends)


def _without_empty(silent: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    return {by: found for by, found in silent.items() if found}


@dataclass
class Beats:
    """How long ago each node's count of beats was last seen to move, on this process's own clock.

    No time of one node is compared with one of another, so clocks may differ. A process that was stopped has heard
    nobody meanwhile, which says nothing of them: it begins anew.
    """

    silent_seconds: float
    suspected_seconds: float
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    _heard: float | None = None

    def hear(self, counts: Mapping[str, int], now: float) -> None:
        """Take note of how often nodes have beaten so far, `now` in seconds."""
        was_stopped = self._heard is not None and now - self._heard > self.silent_seconds / 2
        self._seen = {node: self._of(node, count, now, was_stopped) for node, count in counts.items()}
        self._heard = now

    def _of(self, node: str, count: int, now: float, was_stopped: bool) -> tuple[int, float]:
        last = self._seen.get(node)
        return last if last is not None and last[0] == count and not was_stopped else (count, now)

    def silent(self, now: float, suspected: Collection[str] = ()) -> Iterator[str]:
        """Yield the nodes whose counts have not moved for too long, which is less for those that are suspected."""
        bounds = dict.fromkeys(suspected, self.suspected_seconds)
        return (node for node, (_, at) in self._seen.items() if now - at > bounds.get(node, self.silent_seconds))
