"""Seconds of a communication from its bytes, its ranks and the links between them (ring algorithms)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Topology(Protocol):
    """What the cost of communication needs to know of a cluster."""

    def bytes_per_second(self, a: int, b: int) -> float:
        """Bandwidth from rank `a` to rank `b`."""

    def latency_seconds(self, a: int, b: int) -> float:
        """Seconds that an empty message takes from `a` to `b`."""


def no_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price what needs no communication."""
    return 0.0


def ring_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price one turn around a ring: an all-gather or reduce-scatter of `num_bytes` in all."""
    hops = len(ranks) - 1
    if hops < 1:
        return 0.0
    links = [(rank, ranks[(index + 1) % len(ranks)]) for index, rank in enumerate(ranks)]
    slowest = min(topology.bytes_per_second(a, b) for a, b in links)
    latency = max(topology.latency_seconds(a, b) for a, b in links)
    return hops * (latency + num_bytes / len(ranks) / slowest)


def all_reduce_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price an all-reduce of `num_bytes` on every rank: two turns around the ring."""
    return 2 * ring_cost(num_bytes, ranks, topology)


def send_cost(num_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Price messages of `num_bytes` in all, spread evenly over the senders, on the slowest link."""
    links = [(a, b) for a in ranks for b in ranks if a != b]
    return max((_message(num_bytes / len(ranks), a, b, topology) for a, b in links), default=0.0)


def messages_cost(messages: Iterable[tuple[int, int, int]], topology: Topology) -> float:
    """Price (sender, receiver, bytes) messages: the busiest end of a device sets the time."""
    busy: dict[tuple[str, int], float] = {}
    for sender, receiver, num_bytes in messages:
        seconds = _message(num_bytes, sender, receiver, topology)
        for end in (("out", sender), ("in", receiver)):
            busy[end] = busy.get(end, 0.0) + seconds
    return max(busy.values(), default=0.0)


def _message(num_bytes: float, a: int, b: int, topology: Topology) -> float:
    return topology.latency_seconds(a, b) + num_bytes / topology.bytes_per_second(a, b)
