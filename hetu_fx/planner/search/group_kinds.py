"""What groups of devices are: what stages on them take depends on no more than that."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from dataclasses import replace

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.planner.search.device_orders import Groups


class GroupKinds:
    """What groups are by the classes of their devices, and by which of them share a node; `node` is that of a rank."""

    def __init__(self, cluster: Cluster, memory: Mapping[int, int]) -> None:
        """`memory` is usable bytes by rank."""
        numbers: dict[Hashable, int] = {}
        self._class = {
            device.rank: numbers.setdefault((_but_for_place(device), memory[device.rank]), len(numbers))
            for device in cluster.devices
        }
        self.node = {device.rank: cluster.node_of(device.rank) for device in cluster.devices}
        self._kinds: dict[tuple[int, ...], Hashable] = {}

    def key(self, groups: Groups) -> Hashable:
        """Return what pipelines have in common that take the same: what groups are, and which hand over to a node."""
        nodes = [self.node[group[0]] for group in groups]
        return tuple(map(self.of, groups)), tuple([a != b for a, b in itertools.pairwise(nodes)])

    def of(self, devices: tuple[int, ...]) -> Hashable:
        """Return what a group is: the classes of its devices, and which share a node."""
        if devices not in self._kinds:
            self._kinds[devices] = self._new_kind(devices)
        return self._kinds[devices]

    def _new_kind(self, devices: tuple[int, ...]) -> Hashable:
        nodes: dict[int, int] = {}
        places = [nodes.setdefault(self.node[rank], len(nodes)) for rank in devices]
        classes = tuple([self._class[rank] for rank in devices])
        return (classes, tuple(places)) if len(nodes) > 1 else classes


def _but_for_place(device: Device) -> Device:
    """Return what prices know of a device besides its node; its memory is for the rules to say."""
    return replace(device, rank=0, node="0", source="given", memory_bytes=1)
