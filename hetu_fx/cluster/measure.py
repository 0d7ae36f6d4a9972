"""Measure what this rank's device and links can do, together with all other ranks.

What it costs devices to meet between pieces of compute no message between two idle ones tells: devices that compute do
not come to a meeting at the same moment. A device with a CPU quota waits for its next period, kernels have to be
launched, and the time that one device waits for the other is lost to both. So two devices do pieces of compute alone,
and the same pieces with a meeting after each; what the second takes more than the slower device's first is what the
meetings cost.

Of the ways that messages between two types of devices can take, the quicker is taken from then on: where they can leave
from where they are, and go through the host too, network cards that do not reach a device's memory can make the detour
the shorter one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetu_fx.base.cgroups import own_quota
from hetu_fx.base.device_types import HOST, device_type_record
from hetu_fx.base.machine import short_names
from hetu_fx.cluster.device_speed import Products, matmul_flops_per_second, memory_bytes_per_second, op_seconds
from hetu_fx.cluster.devices import Device, PairLink
from hetu_fx.cluster.host import memory_limits, node_name, step_seconds
from hetu_fx.cluster.links import group_figures, measure_links, time_pairs
from hetu_fx.cluster.topology import TYPE
from hetu_fx.comm_ops.plans.ways import DIRECT, PLACES, STAGED, WAYS, Ends, Way
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.p2p import Tag, post

_PIECE_SECONDS = 0.01  # of compute between two meetings, on every device: as long as the usual period of a quota
_SAMPLES = 4  # so many at least
_SECONDS, _SHARE = 0.4, 0.8  # how long a pair is measured at most, and of what compute was measured for
_STEPS = 5  # of the model: compute is measured for no longer
_HOST_SECONDS = 0.1  # that a host computes at least: noise and what shares its cores have come and gone
_QUOTA_SECONDS = 0.2  # at least with a quota: two of its usual periods

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of some rounds: of the slower device's compute alone, and of the same compute with meetings."""

    alone: float
    together: float
    rounds: int


def meeting_seconds(samples: Sequence[Sample], latency_seconds: float) -> float:
    """Return what a meeting costs besides its message: the median over samples, not below 0."""
    lost = statistics.median((sample.together - sample.alone) / sample.rounds for sample in samples)
    return max(0.0, lost - latency_seconds)


def meeting_rounds(nodes: Sequence[str], speeds: Sequence[float]) -> tuple[tuple[Pair, ...], ...]:
    """Return up to two rounds of pairs that meet at the same time, so that every rank meets another.

    Neighbours in speed on one node meet. The slowest of an odd number meets its neighbour in the second round, or,
    alone on its node, a rank of another one.
    """
    first: list[Pair] = []
    second: list[Pair] = []
    lone: list[int] = []
    for node in dict.fromkeys(nodes):
        members = sorted((rank for rank, name in enumerate(nodes) if name == node), key=lambda rank: -speeds[rank])
        first += zip(members[::2], members[1::2], strict=False)
        if len(members) == 1:
            lone += members
        elif len(members) % 2:
            second.append((members[-2], members[-1]))
    first += zip(lone[::2], lone[1::2], strict=False)
    if len(lone) % 2 and len(nodes) > 1:
        busy = {lone[-1], *(rank for pair in second for rank in pair)}
        second.append((next(rank for rank in range(len(nodes)) if rank not in busy), lone[-1]))
    return tuple(tuple(pairs) for pairs in (first, second) if pairs)


def settled_seconds(alike: Sequence[Any], measured: Mapping[int, float]) -> tuple[float, ...]:
    """Return each rank's seconds: the median of what was measured of ranks that are alike, rounded; 0 for none."""
    same = [[measured[r] for r in range(len(alike)) if alike[r] == kind and r in measured] for kind in alike]
    return tuple(float(f"{statistics.median(values or [0.0]):.3g}") for values in same)


def _measure_meetings(
    table: GroupTable,
    rounds: Sequence[Sequence[Pair]],
    speeds: Sequence[float],
    latencies: Mapping[Pair, float],
    device: str,
    seconds: float,
) -> dict[int, float]:
    """Return what a meeting costs each rank, of its first pair; collective, the same on every rank.

    Args:
        table: the ranks.
        rounds: pairs that meet at the same time, in turn.
        speeds: FLOPs per second of every rank: pieces take equally long on all.
        latencies: seconds of a message between the two of a pair.
        device: where this rank computes.
        seconds: for which a pair is measured at most, but for the last sample.
    """
    found: dict[int, float] = {}
    products = Products(device)
    count = max(1, round(_PIECE_SECONDS * speeds[table.rank] / products.flops))
    for pairs in rounds:
        own = next((pair for pair in pairs if table.rank in pair), None)
        all_gather_object(table, None)
        samples = [] if own is None else _TimedMeeting(table, own, products, count, device).samples(seconds)
        values = all_gather_object(table, meeting_seconds(samples, latencies[own]) if own else None)
        met = {rank: values[rank] for pair in pairs for rank in pair}
        found = {rank: seconds for rank, seconds in met.items() if seconds is not None} | found
    return found


class _TimedMeeting:
    """This rank's side of a pair that measures."""

    def __init__(self, table: GroupTable, pair: Pair, products: Products, count: int, device: str) -> None:
        self._products, self._count = products, count
        self._table, self._partner = table, pair[0] if table.rank == pair[1] else pair[1]
        place = torch.device(device)
        place = HOST if table.is_staged(place, pair) else place
        self._sent = torch.zeros(2, dtype=torch.float64, device=place)  # float64: both ranks take the same decisions
        self._received = torch.zeros_like(self._sent)

    def samples(self, seconds: float) -> list[Sample]:
        """Return samples until so many seconds are over; both ranks return the same ones."""
        self._meet()  # the first message opens the connection
        samples, elapsed = list[Sample](), 0.0
        rounds = max(1, round(seconds / _SAMPLES / 2 / _PIECE_SECONDS))
        while elapsed < seconds or not samples:
            sample = self._sample(rounds)
            samples.append(sample)
            elapsed += sample.alone + sample.together
        return samples

    def _sample(self, rounds: int) -> Sample:
        alone = self._seconds(rounds, meets=False)
        together = self._seconds(rounds, meets=True)
        theirs = self._told(alone, together)
        return Sample(max(alone, theirs[0]), max(together, theirs[1]), rounds)

    def _seconds(self, rounds: int, *, meets: bool) -> float:
        """Return the seconds of so many rounds, started by both at the same time."""
        self._told(0.0, 0.0)
        start = time.perf_counter()
        for _ in range(rounds):
            self._products.start(self._count)
            if meets:
                self._meet()
        self._products.finish()
        return time.perf_counter() - start

    def _told(self, *values: float) -> list[float]:
        """Tell the partner two numbers; return the partner's."""
        self._sent.copy_(self._sent.new_tensor(values))
        self._meet()
        told: list[float] = self._received.tolist()
        return told

    def _meet(self) -> None:
        """Exchange a small message with the partner. One in host memory waits for the device, as a sum would."""
        if self._sent.device.type == "cpu":
            self._products.finish()
        arriving, leaving = ([(self._partner, tensor, Tag.SLICES)] for tensor in (self._received, self._sent))
        post(arriving, leaving, self._table).wait()


TOLERANCE = 0.05
"""Speeds nearer than this to each other are one speed: what differs less is noise."""


Limits = tuple[tuple[str, int], ...]
"""(what is limited, bytes) of a rank's memory: ranks with the same one share it."""


def measure_cluster(
    table: GroupTable | None, *, seconds: float, device: str, step_flops: float
) -> tuple[tuple[Device, ...], Mapping[str, tuple[float, float]], tuple[PairLink, ...], tuple[Way, ...]]:
    """Return what each rank's device was seen to do, links, unlike pairs, and ways to choose among; alike on all ranks.

    Collective. Links and pairs are those of `measure_links`, ways those of `measure_ways`.
    """
    table = table or GroupTable()
    place = torch.device(device)
    told = place.type, seconds if math.isinf(step_flops) else min(seconds, _least_seconds(place))
    types, windows = zip(*all_gather_object(table, told), strict=True)  # all start together: what shares a core shows
    table.know_types(types)
    table.connect(place)
    window = max(windows)
    speed = matmul_flops_per_second(device, window)
    longer = min(seconds, _STEPS * step_flops / sum(all_gather_object(table, speed)))
    if longer > window:
        window, speed = longer, matmul_flops_per_second(device, longer)
    limits = memory_limits(device)
    least = min(size for _, size in limits)
    own = Device(
        table.rank,
        _kind(device),
        node_name(),
        speed,
        least,
        source="measured",
        step_seconds=step_seconds(),
        memory_bytes_per_second=memory_bytes_per_second(device, window / 2),
        op_seconds=op_seconds(device, window / 2),
    )
    found = denoise_devices(all_gather_object(table, (own, limits)))
    nodes, speeds = short_names([d.node for d in found]), [d.flops_per_second for d in found]
    found = tuple(replace(d, node=node) for d, node in zip(found, nodes, strict=True))
    ways = measure_ways(table, nodes, types, device)
    table.set_links(ways, nodes)
    links, pairs, most = measure_links(table, nodes, types, [d.kind for d in found], speeds, device)
    found = tuple(replace(d, bytes_per_second=most.get(rank)) for rank, d in enumerate(found))
    if "types" in links:
        found = tuple(replace(d, place={TYPE: kind}) for d, kind in zip(found, types, strict=True))
    return _with_meetings(found, links, table, device, min(_SECONDS, _SHARE * window)), links, pairs, ways


def _least_seconds(device: torch.device) -> float:
    """Return how long a device computes at least before its speed shows; for ever where its clock rises with work."""
    if device.type != HOST.type:
        return math.inf
    return _HOST_SECONDS if own_quota() is None else _QUOTA_SECONDS


def _with_meetings(
    found: Sequence[Device], links: Mapping[str, tuple[float, float]], table: GroupTable, device: str, seconds: float
) -> tuple[Device, ...]:
    """Return the devices with what meetings cost."""
    nodes, speeds = [d.node for d in found], [d.flops_per_second for d in found]
    rounds = meeting_rounds(nodes, speeds)
    names = {pair: _link_between(found, pair) for pairs in rounds for pair in pairs}
    latencies = {pair: links[name][1] for pair, name in names.items()}
    measured = _measure_meetings(table, rounds, speeds, latencies, device, seconds)
    meetings = settled_seconds([(d.kind, d.node, d.flops_per_second) for d in found], measured)
    return tuple(replace(d, meeting_seconds=lost) for d, lost in zip(found, meetings, strict=True))


def _link_between(devices: Sequence[Device], pair: Pair) -> str:
    """Return the name of the link between two ranks, as `measure_links` calls it."""
    one, other = (devices[rank] for rank in pair)
    if one.node != other.node:
        return "inter"
    return "intra" if one.place == other.place else "types"


def _kind(device: str) -> str:
    place = torch.device(device)
    return device_type_record(place).chip(place)


def denoise_devices(raw: Sequence[tuple[Device, Limits]]) -> tuple[Device, ...]:
    """Return the devices with noise taken off speeds and steps, and each limit shared by those it limits."""
    sharers = Counter((d.node, name) for d, limits in raw for name, _ in limits)
    speeds = group_speeds([d.flops_per_second for d, _ in raw])
    alike = [(d.kind, d.node, speed) for (d, _), speed in zip(raw, speeds, strict=True)]
    steps = settled_seconds(alike, {rank: d.step_seconds for rank, (d, _) in enumerate(raw)})
    anywhere = [(kind, speed) for kind, _, speed in alike]
    memory = settled_seconds(anywhere, _figures({rank: d.memory_bytes_per_second for rank, (d, _) in enumerate(raw)}))
    ops = settled_seconds(anywhere, _figures({rank: d.op_seconds for rank, (d, _) in enumerate(raw)}))
    shares = [min(limit // sharers[d.node, name] for name, limit in limits) for d, limits in raw]
    rows = zip(raw, speeds, shares, steps, memory, ops, strict=True)
    return tuple(
        replace(
            device,
            flops_per_second=speed,
            memory_bytes=size,
            step_seconds=step,
            memory_bytes_per_second=moved or None,
            op_seconds=op or None,
        )
        for (device, _), speed, size, step, moved, op in rows
    )


def _figures(figures: Mapping[int, float | None]) -> dict[int, float]:
    """Return those that are known."""
    return {rank: figure for rank, figure in figures.items() if figure is not None}


def group_speeds(speeds: Sequence[float], tolerance: float = TOLERANCE) -> list[float]:
    """Return speeds, rounded, in which those within `tolerance` of a group's fastest are its median."""
    return group_figures(speeds, tolerance)


def pairs_to_time(nodes: Sequence[str], types: Sequence[str]) -> Mapping[Ends, tuple[int, int]]:
    """Return the first two ranks of each two types, inside a node and between nodes."""
    found: dict[Ends, tuple[int, int]] = {}
    for b in range(len(nodes)):
        for a in range(b):
            one, other = sorted((types[a], types[b]))
            found.setdefault(((one, other), PLACES[nodes[a] != nodes[b]]), (a, b))
    return found


def link_ways(types: tuple[str, str], possible: Sequence[Sequence[str]]) -> tuple[str, ...]:
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
    possible, found = all_gather_object(table, _own_ways(table, device)), []
    for (ends, where), pair in pairs_to_time(nodes, types).items():
        ways = link_ways(ends, [possible[rank] for rank in pair])
        for way in ways if all_ways or len(ways) > 1 else ():
            figures = time_pairs(table, [pair], device, is_staged=way == STAGED)[pair]
            found.append(Way(way, ends, where, *figures))
    return tuple(found)


def _own_ways(table: GroupTable, device: str) -> tuple[str, ...]:
    """Return the ways in which this rank's device could send to another of its type."""
    place = torch.device(device)
    if table.size == 1 or place == HOST:
        return (DIRECT,)
    sends = device_type_record(place).is_direct and table.is_native(place)
    has_host = table.transport.device(table.base) == HOST
    return (DIRECT,) * sends + (STAGED,) * has_host
