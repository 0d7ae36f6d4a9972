"""Seconds of a communication from its bytes, its ranks and the links between them (ring algorithms)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetu_fx.comm_ops.plans.algorithm import by_node, spans


class Topology(Protocol):
    """What the cost of communication needs to know of a cluster."""

    def bytes_per_second(self, a: int, b: int) -> float:
        """Bandwidth from rank `a` to rank `b`."""

    def latency_seconds(self, a: int, b: int) -> float:
        """Seconds that an empty message takes from `a` to `b`."""

    def node_of(self, rank: int) -> int:
        """Number of the node that `rank` stands on; the ranks of a node share its link to the others."""


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


EQUAL_LINKS: Topology = EqualLinks()

Cost = Callable[[float, Sequence[int], Topology], float]

# The collective of equal parts over messages of the same parts (HAP's bandwidth ratio, turned over), as measured with
# gloo on 4 ranks: all-gather 1.2 to 1.3, whatever the size; reduce-scatter 2 to 4.
PADDED_SLOWDOWN = 1.25


def no_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price what needs no communication."""
    return 0.0


def ring_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price one turn around a ring: an all-gather or reduce-scatter of `num_bytes` in all."""
    hops = len(ranks) - 1
    if hops < 1:
        return 0.0
    links = _links(ranks)
    slowest = min(topology.bytes_per_second(a, b) for a, b in links)
    latency = max(topology.latency_seconds(a, b) for a, b in links)
    return hops * (latency + num_bytes / len(ranks) / slowest)


def there_and_back_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price a turn of `num_bytes` in all around a ring, and one of as many that goes on until each is home again."""
    hops = len(ranks) - 1
    return ring_cost(num_bytes, ranks, topology) * (2 * hops + 1) / hops if hops else 0.0


def all_reduce_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price an all-reduce of `num_bytes` on every rank: two turns around the ring."""
    return 2 * ring_cost(num_bytes, ranks, topology)


RING_TURNS: Mapping[Cost, int] = {no_cost: 0, ring_cost: 1, all_reduce_cost: 2}
"""How often the data of an op that costs so much goes around the ring of its ranks."""


def two_level_ring_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price an all-gather or reduce-scatter that goes around a ring of nodes, and around one inside every node."""
    levels = by_node(tuple(ranks), tuple(map(topology.node_of, ranks)))
    inside = max(ring_cost(num_bytes, level, topology) for level in levels)
    # A turn of all lanes at once: they share the nodes' links, so they take as long as one with all.
    return inside + ring_cost(num_bytes, [level[0] for level in levels], topology)


def two_level_all_reduce_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price an all-reduce in two levels: a turn in, two across, a turn back inside."""
    return 2 * two_level_ring_cost(num_bytes, ranks, topology)


def cheapest_ring_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price an all-gather or reduce-scatter in the algorithm that it takes on the links."""
    flat = ring_cost(num_bytes, ranks, topology)
    if not spans([topology.node_of(rank) for rank in ranks]):
        return flat
    return min(flat, two_level_ring_cost(num_bytes, ranks, topology))


def cheapest_all_reduce_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price an all-reduce in the algorithm that it takes on the links: two turns."""
    return 2 * cheapest_ring_cost(num_bytes, ranks, topology)


def padded_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price one collective of equal parts of `num_bytes` in all, padding included, instead of a message per part."""
    return PADDED_SLOWDOWN * ring_cost(num_bytes, ranks, topology)


def send_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price messages of `num_bytes` in all, spread evenly over the senders, on the slowest link."""
    links = [(a, b) for a in ranks for b in ranks if a != b]
    return max((_message(num_bytes / len(ranks), a, b, topology) for a, b in links), default=0.0)


def messages_cost(messages: Iterable[tuple[int, int, float]], topology: Topology) -> float:
    """Price (sender, receiver, bytes) messages: the busiest end of a device, or of a node's link, sets the time."""
    busy: dict[tuple[str, int], float] = {}
    for sender, receiver, num_bytes in messages:
        seconds = _message(num_bytes, sender, receiver, topology)
        for end in (("out", sender), ("in", receiver), *_node_ends(sender, receiver, topology)):
            busy[end] = busy.get(end, 0.0) + seconds
    return max(busy.values(), default=0.0)


def rounds_cost(rounds: Iterable[Iterable[tuple[int, int, float]]], topology: Topology) -> float:
    """Price rounds of messages, one after the other."""
    return sum(messages_cost(messages, topology) for messages in rounds)


def _node_ends(sender: int, receiver: int, topology: Topology) -> list[tuple[str, int]]:
    source, target = topology.node_of(sender), topology.node_of(receiver)
    return [] if source == target else [("out of node", source), ("into node", target)]


def _links(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """List the links of a ring."""
    return [(rank, ranks[(index + 1) % len(ranks)]) for index, rank in enumerate(ranks)]


def _message(num_bytes: float, a: int, b: int, topology: Topology) -> float:
    return topology.latency_seconds(a, b) + num_bytes / topology.bytes_per_second(a, b)


BUCKET_BYTES = 25 << 20
"""Parameters that travel together: large enough for the wire, small enough to start early."""

BUCKETS_AT_ONCE = 3
"""So many are under way when parameters are gathered: enough to keep the wire busy while the next is packed."""
