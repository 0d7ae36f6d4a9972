"""What devices are alike, and what a plan may be: replicas are runs of consecutive devices in some order.

An order of n devices has a separator between neighbours: another replica, another stage, or the same tensor
parallel group. Together with the devices that are left out these are all plans of contiguous groups;
several orders (by speed, by node, slow beside fast) reach the groupings worth having. Pure data; nothing is
priced here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.program import ProgramCosts

EXHAUSTIVE_DEVICES = 8
"""In clusters up to so many devices a replica's stages may have any sizes, above all have one size."""

_MEMORY_STEP = 1.1  # what is measured to be free differs a little from device to device

Groups = tuple[tuple[int, ...], ...]
"""A replica: the devices of each of its stages, in order."""


@dataclass(frozen=True, slots=True)
class Space:
    """Which replicas are allowed: the largest group, the most stages, and if stages may differ in size."""

    largest_group: int
    most_stages: int
    exhaustive: bool = True

    @classmethod
    def of(cls, costs: ProgramCosts, cluster: Cluster, options: PlanOptions) -> Space:
        """Return the space that the program's units and blocks, and the options, allow."""
        return cls(
            largest_group=costs.units if options.tensor_parallel else 1,
            most_stages=max(1, costs.num_blocks) if options.pipelines else 1,
            exhaustive=len(cluster.devices) <= EXHAUSTIVE_DEVICES,
        )

    def replicas(self, devices: Sequence[int]) -> Iterator[Groups]:
        """Yield every replica over all the given devices, in order."""
        shapes = compositions if self.exhaustive else equal_sizes
        for sizes in shapes(len(devices), self.largest_group, self.most_stages):
            stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            yield tuple(tuple(devices[stop - n : stop]) for stop, n in zip(stops, sizes, strict=True))


def compositions(total: int, largest: int, most: int) -> tuple[tuple[int, ...], ...]:
    """Return the ways to write `total` as an ordered sum of at most `most` numbers up to `largest`, the least first."""
    if total == 0:
        return ((),)
    cuts = itertools.chain.from_iterable(itertools.combinations(range(1, total), n) for n in range(min(most, total)))
    found = (tuple(b - a for a, b in itertools.pairwise((0, *some, total))) for some in cuts)
    return tuple(sorted(sizes for sizes in found if max(sizes) <= largest))


def equal_sizes(total: int, largest: int, most: int) -> tuple[tuple[int, ...], ...]:
    """Return those of `compositions` that have equal numbers."""
    sizes = [size for size in range(1, min(total, largest) + 1) if total % size == 0]
    return tuple((size,) * (total // size) for size in sizes if total // size <= most)


def orders(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return the orders of devices to consider, without repeats.

    Fast to slow; slow to fast (a pipeline's front keeps more activations, so slow devices with few blocks may
    stand there); node by node; and fast beside slow, which makes groups of like strength.
    """
    by_speed = sorted(cluster.devices, key=lambda device: (-device.speed, device.rank))
    candidates = (by_speed, by_speed[::-1], _beside(by_speed, cluster), _zigzag(by_speed))
    return tuple(dict.fromkeys(tuple(device.rank for device in order) for order in candidates))


def _beside(devices: Sequence[Device], cluster: Cluster) -> list[Device]:
    """Return the devices rack by rack, node by node, and so on, each in the order in which one of it comes first."""
    ways = {device.rank: cluster.order(device.rank) for device in devices}
    units = (way[: depth + 1] for way in ways.values() for depth in range(len(way)))
    place = {unit: index for index, unit in enumerate(dict.fromkeys(units))}
    return sorted(
        devices, key=lambda device: [place[ways[device.rank][: n + 1]] for n in range(len(ways[device.rank]))]
    )


def alone(cluster: Cluster) -> tuple[Cluster, ...]:
    """Return each node's devices as a cluster, if there are several nodes."""
    nodes = list(dict.fromkeys(device.node for device in cluster.devices))
    others = [[d.rank for d in cluster.devices if d.node != node] for node in nodes]
    return tuple(cluster.without(ranks) for ranks in others) if len(nodes) > 1 else ()


def _zigzag(devices: Sequence[Device]) -> list[Device]:
    """Return fastest, slowest, second fastest, second slowest, and so on."""
    half = (len(devices) + 1) // 2
    fast, slow = devices[:half], devices[half:][::-1]
    pairs = [pair for i, first in enumerate(fast) for pair in (first, *slow[i : i + 1])]
    return list(pairs)


@dataclass(frozen=True, slots=True)
class LikeDevices:
    """Devices that differ in nothing but their nodes, and a little in memory, in the order of the cluster."""

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


def ranks_by_node(devices: Iterable[Device], cluster: Cluster) -> dict[str, list[int]]:
    """Return the ranks of each node; those stand beside each other that meet first: below a switch, in a rack."""
    nodes: dict[str, list[int]] = {}
    for device in sorted(devices, key=lambda device: (cluster.order(device.rank), device.rank)):
        nodes.setdefault(device.node, []).append(device.rank)
    return nodes


def take_group(nodes: Sequence[list[int]], size: int, *, fullest: bool = False) -> tuple[int, ...]:
    """Take so many ranks of the first node that has them, or of the fullest (fewest left); of several if none has."""
    roomy = [ranks for ranks in nodes if len(ranks) >= size] or [list(itertools.chain.from_iterable(nodes))]
    taken = tuple((min(roomy, key=len) if fullest else roomy[0])[:size])
    for ranks in nodes:
        ranks[:] = [rank for rank in ranks if rank not in taken]
    return taken


_PLACE = {"rank", "node", "source", "memory_bytes", "place", "nic"}
_FACTS = attrgetter(*(field.name for field in fields(Device) if field.name not in _PLACE))


def devices_by_likeness(cluster: Cluster) -> tuple[LikeDevices, ...]:
    """Return the devices by all that they have but rank and node, those of like memory together."""
    found: dict[object, list[Device]] = {}
    for device in cluster.devices:
        size = round(math.log(device.memory_bytes, _MEMORY_STEP))
        found.setdefault((_FACTS(device), size), []).append(device)
    return tuple(LikeDevices(f"{some[0].kind}#{some[0].rank}", tuple(some)) for some in found.values())


_NOWHERE: dict[str, Any] = {"rank": 0, "node": "0", "source": "given", "memory_bytes": 1}


class GroupKinds:
    """What groups are by the classes of their devices, and by which of them share a node; `node` is that of a rank."""

    def __init__(self, cluster: Cluster, memory: Mapping[int, int]) -> None:
        """`memory` is usable bytes by rank."""
        numbers: dict[Hashable, int] = {}
        self._class = {
            # What prices know of a device besides its node; its memory is for the rules to say.
            device.rank: numbers.setdefault((replace(device, **_NOWHERE), memory[device.rank]), len(numbers))
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
