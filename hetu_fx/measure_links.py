"""Measure the links between ranks: the slowest pair inside each node and between neighbouring nodes, in turn.

Messages cost the processor time, so that a link is as fast as the devices at its ends.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

from hetu_fx.measure_ranks import Exchange, RankTable, message_device

_LATENCY_ROUNDS = 20
_BANDWIDTH_ROUNDS = 3
_BANDWIDTH_BYTES = 4 << 20
_LONE_LINK = (1e10, 0.0)  # no link to measure: what a lone device's moves would cost in memory


def measure_links(
    table: RankTable, exchange: Exchange, nodes: Sequence[str], speeds: Sequence[float], device: str
) -> dict[str, tuple[float, float]]:
    """Return (bytes per second, latency seconds) of the slowest link inside a node and between nodes; collective.

    They stand under "intra" and "inter"; where no two ranks stand on one node, or all do, the other's numbers
    stand for both.
    """
    pairs = {"intra": intra_pairs(nodes, speeds), "inter": inter_pairs(nodes, speeds)}
    found: dict[str, tuple[float, float]] = {}
    for name, list_of_pairs in pairs.items():
        results = [_time_pair(table, exchange, pair, device) for pair in list_of_pairs]
        if results:
            found[name] = min(bandwidth for bandwidth, _ in results), max(wait for _, wait in results)
    known = found.get("intra") or found.get("inter") or _LONE_LINK
    return {"intra": found.get("intra", known), "inter": found.get("inter", known)}


def intra_pairs(nodes: Sequence[str], speeds: Sequence[float]) -> list[tuple[int, int]]:
    """Return the two slowest ranks of each node that has two."""
    return [(ranks[0], ranks[1]) for ranks in _slowest_first(nodes, speeds) if len(ranks) > 1]


def inter_pairs(nodes: Sequence[str], speeds: Sequence[float]) -> list[tuple[int, int]]:
    """Return the slowest ranks of neighbouring nodes."""
    return list(itertools.pairwise(ranks[0] for ranks in _slowest_first(nodes, speeds)))


def _slowest_first(nodes: Sequence[str], speeds: Sequence[float]) -> list[list[int]]:
    """Return the ranks of each node, slow ones first."""
    members = [[rank for rank, name in enumerate(nodes) if name == node] for node in dict.fromkeys(nodes)]
    return [sorted(ranks, key=lambda rank: speeds[rank]) for ranks in members]


def _time_pair(table: RankTable, exchange: Exchange, pair: tuple[int, int], device: str) -> tuple[float, float]:
    """Return (bytes per second, latency seconds) between two ranks; the others wait. Collective."""
    own = (0.0, 0.0)
    if table.rank in pair:
        wait = _ping_pong(table, pair, device, 1, _LATENCY_ROUNDS)
        whole = _ping_pong(table, pair, device, _BANDWIDTH_BYTES, _BANDWIDTH_ROUNDS)
        own = _BANDWIDTH_BYTES / max(whole - wait, 1e-9), wait
    bandwidth, wait = exchange(own)[pair[0]]
    return float(f"{bandwidth:.3g}"), float(f"{wait:.3g}")


def _ping_pong(table: RankTable, pair: tuple[int, int], device: str, num_bytes: int, rounds: int) -> float:
    """Return the median one-way seconds of a message, after one round of warm-up."""
    import torch
    import torch.distributed as dist

    group = table.group(tuple(range(table.size)))
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=message_device(group, device))
    leads = table.rank == pair[0]
    partner = table.to_global(pair[1] if leads else pair[0])
    steps = (dist.send, dist.recv) if leads else (dist.recv, dist.send)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for step in steps:
            step(message, partner, group=group)
        times.append((time.perf_counter() - start) / 2)
    return statistics.median(times[1:])
