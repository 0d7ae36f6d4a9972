"""Clusters: which devices there are, how fast, how large, and how fast the links between them are.

A `Cluster` is a value, measured (`Cluster.measure`), read from a file (`hetu_fx.cluster/1`) or written down
for devices that are not there. It needs no process group and no torch unless it measures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hetu_fx.base.checks import standing_twice
from hetu_fx.base.json_values import many
from hetu_fx.base.records import Document, Key, record
from hetu_fx.cluster.cluster_table import cluster_text, level_links
from hetu_fx.cluster.devices import (
    COLLECTIVE,
    DEVICE,
    LINKS,
    ClusterLinks,
    Collective,
    Device,
    Link,
    OutsideLink,
    PairLink,
)
from hetu_fx.cluster.paces import PACE, Pace, interpolate_pace
from hetu_fx.cluster.precisions import PRECISION, Precision, by_kind, fastest_in_common, with_faster_products
from hetu_fx.cluster.timed import met_seconds, seen_turn, timed_by_group
from hetu_fx.cluster.topology import CLUSTER, LEVEL, NICS, NODE, TYPE, Hierarchy, Level, Nics, Place, device_ports
from hetu_fx.cluster.ways import WAY, check_ways
from hetu_fx.comm_ops.plans.cost import End
from hetu_fx.comm_ops.plans.ways import Way
from hetu_fx.errors import ClusterError

if TYPE_CHECKING:
    from hetu_fx.comm_ops.wire.groups import GroupTable

__all__ = ["FORMAT", "Cluster", "Collective", "Device", "Link"]

FORMAT = "hetu_fx.cluster/1"


@dataclass(frozen=True)  # no slots: what rings of it cost is kept beside it
class Cluster(Document):
    """The `devices` in order of rank, and the links inside a node (`intra`) and between nodes (`inter`).

    `collectives` are those that were timed, if any; what else is communicated is priced by the links. `paces` are those
    of kinds on which a model's blocks were timed. `ways` are those that messages between types of devices were timed
    on; of several between the same ends the quickest is taken. `precisions` are the low dtypes that kinds compute in.

    Where there is more to say than inside and between nodes, `levels` say it, from inside out; `intra` is then that of
    the node and `inter` that of the level above. `nics` are the network ports of each node. `pairs` are links between
    nodes, or kinds, that are not as `inter` says; of a node that is not there, they say nothing.
    """

    devices: tuple[Device, ...]
    intra: Link
    inter: Link
    collectives: tuple[Collective, ...] = ()
    paces: tuple[Pace, ...] = ()
    ways: tuple[Way, ...] = ()
    precisions: tuple[Precision, ...] = ()
    levels: tuple[Level, ...] = ()
    nics: Nics | None = None
    pairs: tuple[PairLink, ...] = ()
    _by_rank: Mapping[int, Device] = field(init=False, repr=False, compare=False)
    _nodes: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _top_speeds: Mapping[str, float] = field(init=False, repr=False, compare=False)
    _paces: Mapping[str, tuple[Pace, ...]] = field(init=False, repr=False, compare=False)
    _precisions: Mapping[tuple[str, str], float] = field(init=False, repr=False, compare=False)
    _hierarchy: Hierarchy = field(init=False, repr=False, compare=False)
    _timed: Mapping[tuple[str, int, int], list[Collective]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(sorted(self.devices, key=lambda device: device.rank)))
        if not self.devices:
            raise ClusterError("a cluster has no devices\nhint: give at least one")
        ranks = [device.rank for device in self.devices]
        twice = sorted(standing_twice(ranks))
        if twice:
            raise ClusterError(f"ranks {twice} stand twice in a cluster of ranks {ranks}\nhint: give each once")
        # Asked for every link, and for every stage, of a thousand devices.
        object.__setattr__(self, "_by_rank", {device.rank: device for device in self.devices})
        nodes = dict.fromkeys(device.node for device in self.devices)
        object.__setattr__(self, "_nodes", {node: number for number, node in enumerate(nodes)})
        by_speed = sorted(self.devices, key=lambda device: device.speed)
        object.__setattr__(self, "_top_speeds", {device.kind: device.speed for device in by_speed})
        object.__setattr__(self, "_paces", _paces_by_kind(self.paces))
        check_ways(self.ways)
        object.__setattr__(self, "_precisions", by_kind(self.precisions))
        self._set_hierarchy()
        object.__setattr__(self, "_timed", timed_by_group(self.collectives, self.groups, self.node_of))

    def _set_hierarchy(self) -> None:
        if self.nics is not None:  # said of each, so that it stays where others are left out
            ports = device_ports(self.devices, self.nics)
            object.__setattr__(self, "devices", tuple(replace(d, nic=ports[d.rank]) for d in self.devices))
        if self.pairs and self.levels:
            raise ClusterError(
                "a cluster has links of pairs, and levels or 'per'\nhint: give pairs next to 'intra' and 'inter' only"
            )
        if twice := standing_twice((pair.of, pair.between) for pair in self.pairs):
            raise ClusterError(f"links of pairs {twice} stand twice\nhint: give each once")
        levels = self.levels or (_level(NODE, self.intra), _level(CLUSTER, self.inter))
        object.__setattr__(self, "_hierarchy", Hierarchy(self.devices, levels, self.nics, self.pairs))
        if self.levels:
            node = next(index for index, level in enumerate(levels) if level.within == NODE)
            object.__setattr__(self, "intra", levels[node].link)
            object.__setattr__(self, "inter", levels[node + 1 if node + 1 < len(levels) else node].link)

    @classmethod
    def on_paper(
        cls,
        flops_per_second: Sequence[float],
        *,
        memory_bytes: int | Sequence[int] = 1 << 40,
        nodes: Sequence[str] = (),
        kinds: Sequence[str] = (),
        intra: Link | None = None,
        inter: Link | None = None,
        meeting_seconds: Sequence[float] = (),
    ) -> Cluster:
        """Build a cluster of devices that need not be there, rank i with the i-th speed.

        Left out, memory is ample, all devices stand on one node, links are 10 GB/s with no latency, and no time is
        lost to meet.
        """
        count = len(flops_per_second)
        memory = (memory_bytes,) * count if isinstance(memory_bytes, int) else tuple(memory_bytes)
        lost = tuple(meeting_seconds) or (0.0,) * count
        columns = (tuple(kinds) or ("paper",) * count, tuple(nodes) or ("0",) * count, memory, lost)
        if any(len(column) != count for column in columns):
            raise ClusterError(
                f"{count} speeds, but kinds, nodes, memory, meetings {columns}\nhint: give one per device"
            )
        rows = enumerate(zip(*columns[:2], flops_per_second, memory, lost, strict=True))
        devices = tuple(
            Device(rank, kind, node, flops, size, meeting_seconds=meeting)
            for rank, (kind, node, flops, size, meeting) in rows
        )
        link = intra or Link(1e10)
        return cls(devices, link, inter or link)

    @classmethod
    def measure(
        cls,
        table: GroupTable | None = None,
        *,
        seconds: float = 0.5,
        device: str = "cpu",
        step_flops: float = math.inf,
    ) -> Cluster:
        """Measure the devices and links of all ranks; collective, the same value on every rank.

        Args:
            table: the ranks; None: those of torch.distributed's world, or this process alone without one.
            seconds: how long the compute of all ranks is measured, at the same time, after a warm-up.
            device: where this rank computes, such as "cpu" or "cuda:0".
            step_flops: what a step of all ranks computes: compute is measured for no longer than a few steps take, on
                hosts for a tenth of a second at least.

        Where devices of several types stand on one node, a level "type" says what links those of one type there, as
        theirs and others' messages go different ways. Where messages of one type could leave from where they are or go
        through the host, both are timed, and the quicker way is taken from then on, first by what is measured here.

        Every rank multiplies matrices at once, so that what shares a core shows as slow. A quota shows when
        `seconds` covers several of its periods. Speeds within 5 % of each other are taken as equal. Then links are
        timed, and for up to 0.4 seconds what it costs devices to meet between pieces of compute.
        """
        from hetu_fx.cluster.measure import measure_cluster  # with torch, which plans need not have

        devices, links, pairs, ways = measure_cluster(table, seconds=seconds, device=device, step_flops=step_flops)
        intra, inter = Link(*links["intra"]), Link(*links["inter"])
        if "types" not in links:
            return cls(devices, intra, inter, ways=ways, pairs=pairs)
        named = ((TYPE, intra), (NODE, Link(*links["types"])), (CLUSTER, inter))
        return cls(devices, intra, inter, ways=ways, levels=tuple(_level(name, link) for name, link in named))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the node of each device, in order of rank."""
        return tuple(device.node for device in self.devices)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks, in order."""
        return tuple(device.rank for device in self.devices)

    def device(self, rank: int) -> Device:
        """Return the device of a rank; raises `ClusterError` for one that is not there."""
        if rank not in self._by_rank:
            raise ClusterError(f"no device of rank {rank} in a cluster of ranks {list(self.ranks)}")
        return self._by_rank[rank]

    def top_speed(self, kind: str) -> float:
        """Return the speed, as it is now, of the fastest device of a kind."""
        return self._top_speeds[kind]

    def pace(self, kind: str, share: float) -> tuple[float, float]:
        """Return what a kind's (work, rest) take over what is counted, with `share` of what a group splits."""
        known = self._paces.get(kind)
        return interpolate_pace(known, 1 / share if share else 1.0) if known else (1.0, 1.0)

    def computing(self, rank: int, dtype: str | None) -> Device:
        """Return a device as fast as it is in a dtype (None: float32; nor faster in one that nobody has timed)."""
        device = self.device(rank)
        return (
            device if dtype is None else with_faster_products(device, self._precisions.get((device.kind, dtype), 1.0))
        )

    def fastest_dtype(self, ranks: Iterable[int], dtypes: Sequence[str]) -> str | None:
        """Return in which of some dtypes a group of devices, which compute in one, is fastest; None: in float32."""
        kinds = sorted({self.device(rank).kind for rank in ranks})
        return fastest_in_common(kinds, dtypes, self._precisions)

    def in_dtypes(self, dtypes: Sequence[str]) -> Cluster:
        """Return the cluster with every device as fast as it is in the best of some dtypes, or float32."""
        devices = (self.computing(rank, self.fastest_dtype([rank], dtypes)) for rank in self.ranks)
        return replace(self, devices=tuple(devices))

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node, counted in order of rank."""
        return self._nodes[self.device(rank).node]

    def link(self, a: int, b: int) -> Link:
        """Return the link between two ranks, as far as both use it."""
        try:
            return self._hierarchy.link(a, b)
        except KeyError:  # links are asked for far too often to look for their ends each time
            self._refuse_strangers((a, b))
            raise

    def _refuse_strangers(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.device(rank)

    def alike(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first ring that was asked for of those that links know no difference of."""
        try:
            return self._hierarchy.alike(ranks)
        except KeyError:
            self._refuse_strangers(ranks)
            raise

    def ends(self, a: int, b: int) -> tuple[End, ...]:
        """Return what a message between two ranks shares with those of others: ports, and links of nodes and racks."""
        return self._hierarchy.ends(a, b)

    def all_ends(self, a: int, b: int) -> tuple[tuple[Place, float], ...]:
        """Return all that a message between two ranks uses, with its bytes per second, whether it shares it or not."""
        return self._hierarchy.all_ends(a, b)

    def likeness(self, rank: int) -> int:
        """Return a number that all devices share that differ in nothing but rank and place, nor do their links."""
        return self._likenesses[rank]

    @cached_property
    def _likenesses(self) -> dict[int, int]:
        """Return which device is the first that is like each."""
        facts = {
            d.rank: (replace(d, rank=0, node="0", place={}, nic=None), self._hierarchy.peer(d)) for d in self.devices
        }
        first: dict[tuple[Device, Hashable], int] = {}
        return {rank: first.setdefault(one, rank) for rank, one in facts.items()}

    def shared_units(self, rank: int) -> tuple[Place, ...]:
        """Return the units that a device stands in whose links may be shared, by name and number; its node first."""
        return self._hierarchy.shared_units(self.device(rank).rank)

    @property
    def link_units(self) -> dict[str, str]:
        """Return by the names of links that units have, as messages use them, what these units are called."""
        return self._hierarchy.link_units

    def tiers(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return for each level, from inside out, the unit that each of some ranks stands in, numbered from 0."""
        return self._hierarchy.tiers(ranks)

    def order(self, rank: int) -> tuple[int, ...]:
        """Return what ranks are sorted by to stand beside those that they reach best."""
        return self._hierarchy.order(rank)

    def turn_seconds(self, num_bytes: float, ranks: Sequence[int], *, of_sum: bool = False) -> float | None:
        """Return what a turn around a ring was seen to take such a group; None where nobody has timed one.

        `of_sum`: one of the two of an all-reduce.
        """
        if not self.collectives:
            return None
        return seen_turn(self._timed, num_bytes, ranks, self, of_sum=of_sum)

    def bytes_per_second(self, a: int, b: int) -> float:
        """Return the bandwidth between two ranks."""
        return self.link(a, b).bytes_per_second

    def latency_seconds(self, a: int, b: int) -> float:
        """Return the latency between two ranks."""
        return self.link(a, b).latency_seconds

    def meeting_seconds(self, ranks: Sequence[int]) -> float:
        """Return what devices lose, besides messages, when they meet between pieces of compute; 0 for one device."""
        return met_seconds([self._meetings[rank] for rank in ranks]) if len(ranks) > 1 else 0.0

    @cached_property
    def _meetings(self) -> dict[int, float]:
        """Return what a meeting costs each device."""
        return {device.rank: device.meeting_now for device in self.devices}

    def copy_seconds(self, ranks: Iterable[int]) -> float:
        """Return the seconds until each of some devices has moved a byte through its memory."""
        return max(map(self._copies.__getitem__, ranks))

    @cached_property
    def _copies(self) -> dict[int, float]:
        """Return what moving a byte through its memory takes each device."""
        return {device.rank: device.flops_per_byte / device.speed for device in self.devices}

    @property
    def links(self) -> ClusterLinks | None:
        """Return what a file says of links inside a node and between nodes; None where it has levels."""
        if self.levels:
            return None
        inter = OutsideLink(self.inter.bytes_per_second, self.inter.latency_seconds)
        return ClusterLinks(self.intra, inter, tuple(pair for pair in self.pairs if pair.is_among(self.devices)))

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks of the largest node ("intra") and, of several nodes, of all ("inter"); no group of one."""
        nodes: dict[str, list[int]] = {node: [] for node in self._nodes}
        for device in self.devices:
            nodes[device.node].append(device.rank)
        largest = max(nodes.values(), key=len)
        found = {"intra": tuple(largest), "inter": self.ranks if len(nodes) > 1 else ()}
        return {where: ranks for where, ranks in found.items() if len(ranks) > 1}

    def with_rates(self, rates: Mapping[int, float]) -> Cluster:
        """Return the cluster with new straggling rates for the given ranks."""
        self._check_known("rates", rates)
        return replace(self, devices=tuple(replace(d, rate=rates.get(d.rank, d.rate)) for d in self.devices))

    def with_speeds(self, flops_per_second: Mapping[int, float]) -> Cluster:
        """Return the cluster with new FLOP/s of healthy devices for the given ranks, as much faster in all they do."""
        self._check_known("speeds", flops_per_second)
        speeds = ((device, flops_per_second.get(device.rank)) for device in self.devices)
        return replace(self, devices=tuple(d if speed is None else d.at(speed) for d, speed in speeds))

    def with_inter(self, bytes_per_second: float) -> Cluster:
        """Return the cluster with other links between nodes, all alike; of levels, with another above the node."""
        if not self.levels:
            return replace(self, inter=Link(bytes_per_second, self.inter.latency_seconds), pairs=())
        above = [level.within for level in self.levels].index(NODE) + 1
        levels = list(self.levels)
        levels[above] = replace(levels[above], bytes_per_second=bytes_per_second)
        return replace(self, levels=tuple(levels))

    def _check_known(self, what: str, by_rank: Mapping[int, float]) -> None:
        strangers = sorted(set(by_rank) - set(self.ranks))
        if strangers:
            raise ClusterError(f"{what} for ranks {strangers}, but the cluster has ranks {list(self.ranks)}")

    def without(self, ranks: Sequence[int]) -> Cluster:
        """Return the cluster that is left when ranks are gone."""
        return replace(self, devices=tuple(d for d in self.devices if d.rank not in ranks))

    def __repr__(self) -> str:
        kinds = Counter(device.kind for device in self.devices)
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return f"<Cluster: {told} on {len(self._nodes)} nodes>" if len(self._nodes) > 1 else f"<Cluster: {told}>"

    def __str__(self) -> str:
        links = level_links(self.levels) if self.levels else {"intra": self.intra, "inter": self.inter}
        if self.nics is not None:
            links[f"{self.nics.per_node} ports a node, each"] = Link(self.nics.bytes_per_second)
        links |= {" - ".join(pair.between): pair.link for pair in self.pairs}
        return cluster_text(self.devices, links)


def _paces_by_kind(paces: Sequence[Pace]) -> dict[str, tuple[Pace, ...]]:
    """Return the paces of each kind, by size of group; raises `ClusterError` where one stands twice."""
    twice = standing_twice((pace.kind, pace.tensor_parallel) for pace in paces)
    if twice:
        raise ClusterError(f"paces of (kind, tensor_parallel) {twice} stand twice\nhint: give each once")
    ordered = sorted(paces, key=lambda pace: pace.tensor_parallel)
    return {kind: tuple(one for one in ordered if one.kind == kind) for kind in {pace.kind for pace in paces}}


def _level(within: str, link: Link, per: str = "") -> Level:
    return Level(within, link.bytes_per_second, link.latency_seconds, per)


def _cluster(
    devices: tuple[Device, ...], links: ClusterLinks | None, levels: tuple[Level, ...], **others: Any
) -> Cluster:
    """Return the cluster that a file tells of."""
    if (links is None) == (not levels):
        raise ClusterError("a cluster has 'links', inside nodes and between them, or 'levels'\nhint: give one of them")
    if links is None:
        return Cluster(devices, levels[0].link, levels[-1].link, levels=levels, **others)
    inter = links.inter or OutsideLink(links.intra.bytes_per_second, links.intra.latency_seconds)
    for pair in links.pairs:
        if not pair.is_among(devices):
            known = sorted({d.node if pair.of == "nodes" else d.kind for d in devices})
            raise ClusterError(
                f"links.pairs names {pair.of} {list(pair.between)}, not both there\nhint: give two of {known}"
            )
    others["pairs"] = links.pairs
    if inter.per:
        levels = _level(NODE, links.intra), _level(CLUSTER, inter.link, inter.per)
    return Cluster(devices, links.intra, inter.link, levels=levels, **others)


Cluster.form = record(
    _cluster,
    ClusterError,
    like=Cluster,
    order="devices links levels nics collectives paces ways precisions",
    format=FORMAT,
    devices=Key(many(DEVICE.values)),
    links=Key(LINKS, default=None),
    levels=Key(many(LEVEL.values)),
    nics=Key(NICS),
    collectives=Key(many(COLLECTIVE.values)),
    paces=Key(many(PACE.values)),
    ways=Key(many(WAY.values)),
    precisions=Key(many(PRECISION.values)),
)
