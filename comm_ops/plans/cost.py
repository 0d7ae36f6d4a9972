"""Seconds of a communication from its bytes, its ranks and the links between them (ring algorithms)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Protocol

from hetu_fx.base.once import once
from hetu_fx.comm_ops.plans.algorithm import by_node, member_tiers, spans
from hetu_fx.comm_ops.plans.algorithm import lanes as lanes_of


@dataclass(frozen=True, slots=True)
class End:
    """What messages of several devices share, in one direction: a port, the link of a node or a rack.

    `key` names it and numbers what has it: ("out of node", 0). `ranks` are all that send through it, or receive. None
    are told where a node's link is shared as far as is known.
    """

    key: tuple[str, int]
    bytes_per_second: float
    ranks: frozenset[int]


class Topology(Protocol):
    """What the cost of communication needs to know of a cluster."""

    def bytes_per_second(self, a: int, b: int) -> float:
        """Bandwidth from rank `a` to rank `b`."""

    def latency_seconds(self, a: int, b: int) -> float:
        """Seconds that an empty message takes from `a` to `b`."""

    def node_of(self, rank: int) -> int:
        """Number of the node that `rank` stands on; the ranks of a node share its link to the others."""

    def ends(self, a: int, b: int) -> tuple[End, ...]:
        """What a message from `a` to `b` shares with those of other ranks."""

    def tiers(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Numbers of the switches, nodes, racks that `ranks` stand on, from inside out, as far as these differ."""

    def alike(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first ring that was asked for of those that links know no difference of."""

    def turn_seconds(self, num_bytes: float, ranks: Sequence[int], *, of_sum: bool = False) -> float | None:
        """Seconds that a turn of `num_bytes` in all around the ring of `ranks` was seen to take; None: nobody knows.

        `of_sum`: one of the two of an all-reduce.
        """


@dataclass(frozen=True)
class EqualLinks:
    """Links that differ in nothing, inside one node; left out, they carry a byte a second and start at once."""

    speed: float = 1.0
    latency: float = 0.0

    def bytes_per_second(self, a: int, b: int) -> float:
        """Bandwidth between any two ranks."""
        return self.speed

    def latency_seconds(self, a: int, b: int) -> float:
        """Seconds that an empty message takes between any two ranks."""
        return self.latency

    def node_of(self, rank: int) -> int:
        """All ranks stand on one node."""
        return 0

    def ends(self, a: int, b: int) -> tuple[End, ...]:
        """Ranks of several nodes share these, if nobody says more; those of one node share nothing."""
        here, there = self.node_of(a), self.node_of(b)
        if here == there:
            return ()
        speed = self.bytes_per_second(a, b)
        return tuple(End(key, speed, frozenset()) for key in (("out of node", here), ("into node", there)))

    def tiers(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Nodes are the only tier."""
        numbers: dict[int, int] = {}
        return (tuple(numbers.setdefault(self.node_of(rank), len(numbers)) for rank in ranks),)

    def alike(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Every ring is another one, if nobody says more."""
        return ranks

    def turn_seconds(self, num_bytes: float, ranks: Sequence[int], *, of_sum: bool = False) -> float | None:
        """Nobody has timed anything."""
        return None


_MANY = 1 << 40  # bytes that make latency vanish

EQUAL_LINKS: Topology = EqualLinks()

Cost = Callable[[float, Sequence[int], Topology], float]

# The collective of equal parts over messages of the same parts (HAP's bandwidth ratio, turned over), as measured with
# gloo on 4 ranks: all-gather 1.2 to 1.3, whatever the size; reduce-scatter 2 to 4.
PADDED_SLOWDOWN = 1.25


def no_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price what needs no communication."""
    return 0.0


def ring_cost(num_bytes: float, ranks: Sequence[int], topology: Topology, lanes: int = 1) -> float:
    """Price one turn around a ring: an all-gather or reduce-scatter of `num_bytes` in all.

    Where links are shared, all that share them go around rings of their own at the same time; `lanes` says so of nodes
    whose links are shared as far as is known. A ring that comes through a node several times shares its links with
    itself.
    """
    hops = len(ranks) - 1
    if hops < 1:
        return 0.0
    latency, speed = _slowest_link(topology, topology.alike(tuple(ranks)), lanes)
    return hops * (latency + num_bytes / len(ranks) / speed)


@once
def _slowest_link(topology: Topology, ranks: tuple[int, ...], lanes: int) -> tuple[float, float]:
    """Return the latency and the bytes per second of the slowest link of a ring, as it is shared."""
    links, crossings, ends = _links(ranks), dict[Hashable, int](), dict[Hashable, End]()
    latency = max(starmap(topology.latency_seconds, links))
    speed = min(starmap(topology.bytes_per_second, links))
    for end in chain.from_iterable(starmap(topology.ends, links)):
        crossings[end.key] = crossings.get(end.key, 0) + 1
        ends[end.key] = end
    members = set(ranks)
    shared = [
        end.bytes_per_second / crossings[key] / (len(end.ranks) / len(members & end.ranks) if end.ranks else lanes)
        for key, end in ends.items()
    ]
    return latency, min([speed, *shared])


def there_and_back_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price a turn of `num_bytes` in all around a ring, and one of as many that goes on until each is home again."""
    hops = len(ranks) - 1
    return ring_cost(num_bytes, ranks, topology) * (2 * hops + 1) / hops if hops else 0.0


def all_reduce_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price an all-reduce of `num_bytes` on every rank: two turns around the ring."""
    return 2 * ring_cost(num_bytes, ranks, topology)


RING_TURNS: Mapping[Cost, int] = {no_cost: 0, ring_cost: 1, all_reduce_cost: 2}
"""How often the data of an op that costs so much goes around the ring of its ranks."""


@dataclass(frozen=True, slots=True)
class _Levels:
    """What turns in levels take by their bytes: around rings that differ inside units, then in lanes that differ.

    A ring is (hops, devices, latency, bytes per second); the lanes are all around at once.
    """

    inside: frozenset[tuple[int, int, float, float]]
    num_lanes: int = 1
    across: frozenset[_Levels] = frozenset()

    def seconds(self, num_bytes: float) -> float:
        """Return what a turn of `num_bytes` in all takes."""
        inside = max(hops * (latency + num_bytes / size / speed) for hops, size, latency, speed in self.inside)
        size = num_bytes / self.num_lanes
        return inside + max(lane.seconds(size) for lane in self.across) if self.across else inside


def _levels(topology: Topology, ranks: tuple[int, ...], tiers: tuple[tuple[int, ...], ...], lanes: int = 1) -> _Levels:
    """Return an all-gather or reduce-scatter inside units and across them, and so on at each of some tiers.

    `tiers` has the unit of each rank, from inside out. Across, ranks meet in lanes, all at once, that share the links.
    """
    units = by_node(ranks, tiers[0]) if tiers else (ranks,)
    unlike = dict.fromkeys(map(topology.alike, units))
    rings = ((len(unit) - 1, len(unit), *_slowest_link(topology, unit, lanes)) for unit in unlike if len(unit) > 1)
    inside = frozenset(rings) or frozenset([(0, 1, 0.0, 1.0)])
    if not tiers:
        return _Levels(inside)
    across = lanes_of(units)
    outer = dict.fromkeys((topology.alike(lane), member_tiers(tiers[1:], ranks, lane)) for lane in across)
    return _Levels(inside, len(across), frozenset(_levels(topology, *one, lanes * len(across)) for one in outer))


def cheapest_tiers(ranks: Sequence[int], topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return the tiers by which a large collective is cheapest in levels: one, all, or none that there are."""
    return _cheapest_levels(topology, topology.alike(tuple(ranks)))[0]


@once
def _cheapest_levels(topology: Topology, ranks: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], _Levels]:
    """Return these tiers, and what turns take by them."""
    tiers = tuple(tier for tier in topology.tiers(ranks) if spans(tier))
    choices = [*((tier,) for tier in tiers), tiers] if len(tiers) > 1 else [tiers]
    found = [(one, _levels(topology, ranks, one)) for one in choices]
    return min(found, key=lambda pair: pair[1].seconds(_MANY))


def two_level_ring_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price an all-gather or reduce-scatter in levels, by the tiers that are cheapest."""
    return _cheapest_levels(topology, topology.alike(tuple(ranks)))[1].seconds(num_bytes)


def two_level_all_reduce_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price an all-reduce in levels: with two, a turn in, two across, a turn back inside."""
    return 2 * two_level_ring_cost(num_bytes, ranks, topology)


def cheapest_ring_cost(num_bytes: float, ranks: Sequence[int], topology: Topology, *, of_sum: bool = False) -> float:
    """Price an all-gather or reduce-scatter as it was timed among such ranks, else in its algorithm on the links.

    `of_sum`: one of the two turns of an all-reduce.
    """
    if (seen := topology.turn_seconds(num_bytes, ranks, of_sum=of_sum)) is not None:
        return seen
    flat = ring_cost(num_bytes, ranks, topology)
    if not cheapest_tiers(ranks, topology):
        return flat
    return min(flat, two_level_ring_cost(num_bytes, ranks, topology))


def cheapest_all_reduce_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price an all-reduce in the algorithm that it takes on the links: two turns."""
    return 2 * cheapest_ring_cost(num_bytes, ranks, topology, of_sum=True)


def padded_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price one collective of equal parts of `num_bytes` in all, padding included, instead of a message per part."""
    return PADDED_SLOWDOWN * ring_cost(num_bytes, ranks, topology)


def send_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price messages of `num_bytes` in all, spread evenly over the senders, on the slowest link."""
    links = [(a, b) for a in ranks for b in ranks if a != b]
    return max((_message(num_bytes / len(ranks), a, b, topology) for a, b in links), default=0.0)


def messages_cost(messages: Iterable[tuple[int, int, float]], topology: Topology) -> float:
    """Price (sender, receiver, bytes) messages: the busiest end of a device, or of a node's link, sets the time."""
    busy: dict[Hashable, float] = {}
    for sender, receiver, num_bytes in messages:
        seconds = _message(num_bytes, sender, receiver, topology)
        latency = topology.latency_seconds(sender, receiver)
        for end in (("out", sender), ("in", receiver)):
            busy[end] = busy.get(end, 0.0) + seconds
        for shared in topology.ends(sender, receiver):
            busy[shared.key] = busy.get(shared.key, 0.0) + latency + num_bytes / shared.bytes_per_second
    return max(busy.values(), default=0.0)


def rounds_cost(rounds: Iterable[Iterable[tuple[int, int, float]]], topology: Topology) -> float:
    """Price rounds of messages, one after the other."""
    return sum(messages_cost(messages, topology) for messages in rounds)


def _links(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """List the links of a ring."""
    return list(zip(ranks, (*ranks[1:], *ranks[:1]), strict=True))


def _message(num_bytes: float, a: int, b: int, topology: Topology) -> float:
    return topology.latency_seconds(a, b) + num_bytes / topology.bytes_per_second(a, b)


BUCKET_BYTES = 25 << 20
"""Parameters that travel together: large enough for the wire, small enough to start early."""

BUCKETS_AT_ONCE = 3
"""So many are under way when parameters are gathered: enough to keep the wire busy while the next is packed."""
