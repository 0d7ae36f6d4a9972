"""Measure what this rank's device and links can do, together with all other ranks.

Raw numbers only; `hetu_fx.topology` makes a cluster of them. Torch is imported when something is measured.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

TOLERANCE = 0.05
"""Speeds nearer than this to each other are one speed: what differs less is noise."""

_MATRIX = {"cpu": 256, "cuda": 4096}  # side of the matrices: about a millisecond of work
_LATENCY_ROUNDS = 20
_BANDWIDTH_ROUNDS = 3
_BANDWIDTH_BYTES = 4 << 20
_LONE_LINK = (1e10, 0.0)  # no link to measure: what a lone device's moves would cost in memory


class RankTable(Protocol):
    """What measuring needs of a group table (`hetu_fx.comm_ops.groups.GroupTable`)."""

    @property
    def rank(self) -> int:
        """This process's logical rank."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def group(self, ranks: Sequence[int]) -> Any:
        """Return the process group of some logical ranks."""
        ...

    def to_global(self, rank: int) -> int:
        """Return torch.distributed's rank of a logical rank."""
        ...


@dataclass(frozen=True, slots=True)
class Measurement:
    """One rank's numbers. `limits` are (what is limited, bytes): ranks with the same one share it."""

    kind: str
    node: str
    flops_per_second: float
    limits: tuple[tuple[str, int], ...]
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _World:
    """The ranks of torch.distributed's default group, or this process alone."""

    rank: int
    size: int

    def group(self, ranks: Sequence[int]) -> Any:
        return None

    def to_global(self, rank: int) -> int:
        return rank


def _world() -> _World:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return _World(dist.get_rank(), dist.get_world_size())
    return _World(0, 1)


def measure_here(
    table: RankTable | None, *, seconds: float, device: str
) -> tuple[tuple[Measurement, ...], Mapping[str, tuple[float, float]]]:
    """Measure all ranks; collective. Returns each rank's numbers and the links, the same on every rank.

    Links are (bytes per second, latency seconds) under "intra" and "inter"; where no two ranks stand on one
    node, or all do, the other's numbers stand for both.
    """
    ranks: RankTable = table or _world()
    exchange = _exchange_of(ranks)
    exchange(None)  # all start together, so that what shares a core shows
    speed = matmul_flops_per_second(device, seconds)
    own = Measurement(_kind(device), node_name(), speed, memory_limits(device))
    found = settled(exchange(own))
    nodes = [measurement.node for measurement in found]
    return found, _links(ranks, exchange, nodes, device)


def _exchange_of(table: RankTable) -> Callable[[Any], list[Any]]:
    """Return a function that gives every rank's value to every rank."""
    if table.size == 1:
        return lambda value: [value]
    import torch.distributed as dist

    group = table.group(tuple(range(table.size)))

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * table.size
        dist.all_gather_object(values, value, group=group)
        return values

    return exchange


def matmul_flops_per_second(device: str, seconds: float) -> float:
    """Return the FLOP/s of float32 matrix products over a window of wall time, after a warm-up.

    Wall time, not CPU time: a device that waits for its quota is slow. The warm-up of a fifth of the window
    also uses up what quota was saved before.
    """
    import torch

    side = _MATRIX[torch.device(device).type]
    a = torch.ones(side, side, device=device)
    b, out = torch.ones_like(a), torch.empty_like(a)
    _products(a, b, out, seconds / 5)
    count, elapsed = _products(a, b, out, seconds)
    return 2.0 * side**3 * count / elapsed


def _products(a: Any, b: Any, out: Any, seconds: float) -> tuple[int, float]:
    import torch

    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or count == 0:
        torch.mm(a, b, out=out)
        if a.is_cuda:
            torch.cuda.synchronize(a.device)
        count += 1
    return count, elapsed


def _kind(device: str) -> str:
    import torch

    place = torch.device(device)
    if place.type == "cuda":
        return torch.cuda.get_device_name(place).lower().replace(" ", "-")
    return place.type


def node_name() -> str:
    """Return the machine's name, or HETU_FX_NODE: emulated nodes share one machine."""
    return os.environ.get("HETU_FX_NODE") or socket.gethostname()


def memory_limits(device: str, root: Path = Path("/")) -> tuple[tuple[str, int], ...]:
    """Return every limit on this rank's memory as (name of what is limited, bytes)."""
    import torch

    place = torch.device(device)
    if place.type == "cuda":
        properties = torch.cuda.get_device_properties(place)
        return ((f"cuda {getattr(properties, 'uuid', place)}", int(properties.total_memory)),)
    return (("machine", _machine_bytes(root)), *_cgroup_limits(root))


def _machine_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_limits(root: Path) -> tuple[tuple[str, int], ...]:
    """Return the limits of our memory cgroup and of those above it (v2 `memory.max`, v1 limit_in_bytes)."""
    found: list[tuple[str, int]] = []
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _limits_above(root / "sys/fs/cgroup", path, "memory.max")
            found += _limits_above(root / "sys/fs/cgroup/unified", path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits_above(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return tuple(found)


def _limits_above(mount: Path, path: str, file: str) -> list[tuple[str, int]]:
    folder = mount / path.strip("/")
    folders = [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]
    limits = [(str(place), _limit_in(place / file)) for place in folders]
    return [(name, limit) for name, limit in limits if limit is not None]


def _limit_in(file: Path) -> int | None:
    """Return a limit, or None for no file, `max`, or v1's "no limit" near 2**63."""
    text = file.read_text().strip() if file.exists() else "max"
    limit = int(text) if text.isdigit() else None
    return None if limit is None or limit >= 1 << 60 else limit


def settled(raw: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Return the measurements with noise taken off the speeds and each limit shared by those it limits."""
    sharers = Counter((m.node, name) for m in raw for name, _ in m.limits)
    speeds = snapped([m.flops_per_second for m in raw])
    shares = [min(limit // sharers[m.node, name] for name, limit in m.limits) for m in raw]
    triples = zip(raw, speeds, shares, strict=True)
    return tuple(replace(m, flops_per_second=speed, memory_bytes=share) for m, speed, share in triples)


def snapped(speeds: Sequence[float], tolerance: float = TOLERANCE) -> list[float]:
    """Return speeds, rounded, in which those within `tolerance` of a group's fastest are its median."""
    result = [0.0] * len(speeds)
    left = sorted(range(len(speeds)), key=lambda i: -speeds[i])
    while left:
        group = [i for i in left if speeds[i] >= speeds[left[0]] * (1 - tolerance)]
        median = float(f"{statistics.median(speeds[i] for i in group):.3g}")
        for index in group:
            result[index] = median
        left = left[len(group) :]
    return result


def _links(
    table: RankTable, exchange: Callable[[Any], list[Any]], nodes: Sequence[str], device: str
) -> dict[str, tuple[float, float]]:
    """Time a pair inside each node and between neighbouring nodes, in turn; keep the slowest of each."""
    pairs = {"intra": intra_pairs(nodes), "inter": inter_pairs(nodes)}
    found: dict[str, tuple[float, float]] = {}
    for name, list_of_pairs in pairs.items():
        results = [_time_pair(table, exchange, pair, device) for pair in list_of_pairs]
        if results:
            found[name] = min(bandwidth for bandwidth, _ in results), max(wait for _, wait in results)
    known = found.get("intra") or found.get("inter") or _LONE_LINK
    return {"intra": found.get("intra", known), "inter": found.get("inter", known)}


def intra_pairs(nodes: Sequence[str]) -> list[tuple[int, int]]:
    """Return the first two ranks of each node that has two."""
    members = {node: [rank for rank, name in enumerate(nodes) if name == node] for node in nodes}
    return [(ranks[0], ranks[1]) for ranks in members.values() if len(ranks) > 1]


def inter_pairs(nodes: Sequence[str]) -> list[tuple[int, int]]:
    """Return the first ranks of neighbouring nodes."""
    first = [nodes.index(node) for node in dict.fromkeys(nodes)]
    return list(itertools.pairwise(first))


def _time_pair(
    table: RankTable, exchange: Callable[[Any], list[Any]], pair: tuple[int, int], device: str
) -> tuple[float, float]:
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
    place = device if dist.get_backend(group) == "nccl" else "cpu"
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=place)
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
