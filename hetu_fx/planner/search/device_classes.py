"""Devices that differ in nothing but their nodes, and a little in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hetu_fx.cluster.cluster import Cluster, Device

_MEMORY_STEP = 1.1  # what is measured to be free differs a little from device to device


@dataclass(frozen=True, slots=True)
class Alike:
    """Such devices, in the order of the cluster."""

    name: str
    devices: tuple[Device, ...]

    @property
    def one(self) -> Device:
        """Return one of them."""
        return self.devices[0]

    @property
    def memory_bytes(self) -> int:
        """Return what each of them has at least."""
        return min(device.memory_bytes for device in self.devices)


def ranks_by_node(devices: Iterable[Device]) -> dict[str, list[int]]:
    """Return the ranks of each node, both in the order of the devices."""
    nodes: dict[str, list[int]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device.rank)
    return nodes


def alike_in(cluster: Cluster) -> tuple[Alike, ...]:
    """Return the devices by all that they have but rank and node, those of like memory together."""
    found: dict[object, list[Device]] = {}
    for device in cluster.devices:
        size = round(math.log(device.memory_bytes, _MEMORY_STEP))
        key = replace(device, rank=0, node="0", source="given", memory_bytes=1)
        found.setdefault((key, size), []).append(device)
    return tuple(Alike(f"{some[0].kind}#{some[0].rank}", tuple(some)) for some in found.values())
