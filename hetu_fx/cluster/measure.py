"""Measure what this rank's device and links can do, together with all other ranks.

Raw numbers only; `hetu_fx.cluster.cluster` makes a cluster of them.
"""

from __future__ import annotations

import os
import socket
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hetu_fx.base.cgroups import upwards
from hetu_fx.cluster.links import measure_links
from hetu_fx.cluster.meeting import measure_meetings, meeting_rounds, settled_seconds
from hetu_fx.cluster.speed import matmul_flops_per_second, step_seconds
from hetu_fx.comm_ops.wire.consensus import of_all
from hetu_fx.comm_ops.wire.groups import GroupTable

TOLERANCE = 0.05
"""Speeds nearer than this to each other are one speed: what differs less is noise."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One rank's numbers. `limits` are (what is limited, bytes): ranks with the same one share it."""

    kind: str
    node: str
    flops_per_second: float
    limits: tuple[tuple[str, int], ...]
    memory_bytes: int = 0
    meeting_seconds: float = 0.0
    step_seconds: float = 0.0
    bytes_per_second: float | None = None


def measure_here(
    table: GroupTable | None, *, seconds: float, device: str
) -> tuple[tuple[Measurement, ...], Mapping[str, tuple[float, float]]]:
    """Measure all ranks; collective. Returns each rank's numbers and the links, the same on every rank.

    Links are those of `measure_links`.
    """
    table = table or GroupTable()
    of_all(table, None)  # all start together, so that what shares a core shows
    speed = matmul_flops_per_second(device, seconds)
    own = Measurement(_kind(device), node_name(), speed, memory_limits(device), step_seconds=step_seconds())
    found = settled(of_all(table, own))
    nodes, speeds = [m.node for m in found], [m.flops_per_second for m in found]
    links, most = measure_links(table, nodes, speeds, device)
    found = tuple(replace(m, bytes_per_second=most.get(rank)) for rank, m in enumerate(found))
    return _with_meetings(found, links, table, device), links


def _with_meetings(
    found: Sequence[Measurement],
    links: Mapping[str, tuple[float, float]],
    table: GroupTable,
    device: str,
) -> tuple[Measurement, ...]:
    """Return the measurements with what meetings cost."""
    nodes, speeds = [m.node for m in found], [m.flops_per_second for m in found]
    rounds = meeting_rounds(nodes, speeds)
    names = {pair: "intra" if nodes[pair[0]] == nodes[pair[1]] else "inter" for pairs in rounds for pair in pairs}
    latencies = {pair: links[name][1] for pair, name in names.items()}
    measured = measure_meetings(table, rounds, speeds, latencies, device)
    meetings = settled_seconds([(m.kind, m.node, m.flops_per_second) for m in found], measured)
    return tuple(replace(m, meeting_seconds=lost) for m, lost in zip(found, meetings, strict=True))


def _kind(device: str) -> str:
    place = torch.device(device)
    if place.type == "cuda":
        return torch.cuda.get_device_name(place).lower().replace(" ", "-")
    return place.type


def node_name() -> str:
    """Return the machine's name, or HETU_FX_NODE: emulated nodes share one machine."""
    return os.environ.get("HETU_FX_NODE") or socket.gethostname()


def memory_limits(device: str, root: Path = Path("/")) -> tuple[tuple[str, int], ...]:
    """Return every limit on this rank's memory as (name of what is limited, bytes)."""
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
    limits = [(str(place), _limit_in(place / file)) for place in upwards(mount / path.strip("/"), mount)]
    return [(name, limit) for name, limit in limits if limit is not None]


def _limit_in(file: Path) -> int | None:
    """Return a limit, or None for no file, `max`, or v1's "no limit" near 2**63."""
    text = file.read_text().strip() if file.exists() else "max"
    limit = int(text) if text.isdigit() else None
    return None if limit is None or limit >= 1 << 60 else limit


def settled(raw: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Return the measurements with noise taken off speeds and steps, and each limit shared by those it limits."""
    sharers = Counter((m.node, name) for m in raw for name, _ in m.limits)
    speeds = snapped([m.flops_per_second for m in raw])
    shares = [min(limit // sharers[m.node, name] for name, limit in m.limits) for m in raw]
    kinds = [(m.kind, m.node, speed) for m, speed in zip(raw, speeds, strict=True)]
    steps = settled_seconds(kinds, {rank: m.step_seconds for rank, m in enumerate(raw)})
    rows = zip(raw, speeds, shares, steps, strict=True)
    return tuple(replace(m, flops_per_second=f, memory_bytes=size, step_seconds=s) for m, f, size, s in rows)


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
