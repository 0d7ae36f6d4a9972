"""Time the ways that messages between two types of devices can take.

Where messages can leave from where they are, and go through the host too, the quicker way is taken from then on:
network cards that do not reach a device's memory can make the detour the shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hetu_fx.base.device_types import HOST, type_of
from hetu_fx.cluster.links import time_pairs
from hetu_fx.comm_ops.plans.ways import DIRECT, PLACES, STAGED, WAYS, Ends, Way
from hetu_fx.comm_ops.wire.consensus import of_all
from hetu_fx.comm_ops.wire.groups import GroupTable


def pairs_to_time(nodes: Sequence[str], types: Sequence[str]) -> Mapping[Ends, tuple[int, int]]:
    """Return the first two ranks of each two types, inside a node and between nodes."""
    found: dict[Ends, tuple[int, int]] = {}
    for b in range(len(nodes)):
        for a in range(b):
            one, other = sorted((types[a], types[b]))
            found.setdefault(((one, other), PLACES[nodes[a] != nodes[b]]), (a, b))
    return found


def ways_between(types: tuple[str, str], possible: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the ways between two devices, of which each could send in some ways to one of its own type."""
    if types[0] != types[1]:
        return (STAGED,)
    return tuple(way for way in WAYS if all(way in own for own in possible))


def measure_ways(
    table: GroupTable, nodes: Sequence[str], types: Sequence[str], device: str, *, all_ways: bool = False
) -> tuple[Way, ...]:
    """Time the ways between types of devices; collective, the same on every rank.

    Args:
        table: the ranks.
        nodes: that of each.
        types: of each one's device.
        device: where this rank computes.
        all_ways: time those too between whose ends there is no choice.
    """
    possible, found = of_all(table, _own_ways(table, device)), []
    for (ends, where), pair in pairs_to_time(nodes, types).items():
        ways = ways_between(ends, [possible[rank] for rank in pair])
        for way in ways if all_ways or len(ways) > 1 else ():
            figures = time_pairs(table, [pair], device, is_staged=way == STAGED)[pair]
            found.append(Way(way, ends, where, *figures))
    return tuple(found)


def _own_ways(table: GroupTable, device: str) -> tuple[str, ...]:
    """Return the ways in which this rank's device could send to another of its type."""
    place = torch.device(device)
    if table.size == 1 or place == HOST:
        return (DIRECT,)
    sends = type_of(place).is_direct and table.is_native(place)
    has_host = table.transport.device(table.base) == HOST
    return (DIRECT,) * sends + (STAGED,) * has_host
