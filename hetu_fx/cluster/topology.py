"""Which devices share a switch, a node, a rack; what links them there, and what of it they share.

Levels are told from inside out. Two devices meet at the first level whose unit both stand in, and send each other what
that level's link carries. A level says `per` what unit it does so: `device`, each on its own, or a smaller unit, whose
devices share it. A node's network ports (`Nics`) are shared by the devices that hang on each. A level called `rail`,
right above the node, links devices on ports of one number, without what stands above it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import eq

from hetu_fx.base.checks import check_not_negative, check_positive
from hetu_fx.base.documents import nearest
from hetu_fx.base.records import Key, record
from hetu_fx.cluster.devices import Device, Link, PairLink
from hetu_fx.comm_ops.plans.cost import End
from hetu_fx.errors import ClusterError

NODE, RAIL, CLUSTER, DEVICE_UNIT, PORT = "node", "rail", "cluster", "device", "port"
TYPE = "type"
"""The level of devices of one type on a node, where a node has several: what drives them, as torch calls it."""
OUT_OF, INTO = "out of", "into"
_NAMED = (NODE, RAIL, CLUSTER)
"""Levels whose units no device's place names: they follow from its node and its port."""

Unit = tuple[Hashable, ...]

Place = tuple[str, int]
"""What is used, and of which device or unit, by number: ("out", 3), ("out of node", 0), ("into rack", 1)."""


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of unit that devices stand in, and the link between devices that meet there.

    Attributes:
        within: what the unit is called, such as "switch", "node", "rack"; the last level is "cluster".
        bytes_per_second, latency_seconds: of the link.
        per: whose link it is: "device", or the name of a smaller level; "": nobody has said. Then messages that leave a
            node share it, as from a file without levels, and rings do not.
    """

    within: str
    bytes_per_second: float
    latency_seconds: float = 0.0
    per: str = ""

    def __post_init__(self) -> None:
        check_positive(ClusterError, f"level {self.within!r}", bytes_per_second=self.bytes_per_second)
        check_not_negative(ClusterError, f"level {self.within!r}", latency_seconds=self.latency_seconds)

    @property
    def link(self) -> Link:
        """Return what links two devices that meet here."""
        return Link(self.bytes_per_second, self.latency_seconds)


@dataclass(frozen=True, slots=True)
class Nics:
    """Network ports of each node, and the bytes per second of one; devices hang on them evenly, in order of rank."""

    per_node: int
    bytes_per_second: float

    def __post_init__(self) -> None:
        check_positive(ClusterError, "nics", per_node=self.per_node, bytes_per_second=self.bytes_per_second)


LEVEL = record(Level, ClusterError, latency_seconds=Key(written="always"))
NICS = record(Nics, ClusterError)


def _check_levels(levels: Sequence[Level], nics: Nics | None) -> None:
    """Raise `ClusterError` for levels that are no way from devices to the whole cluster."""
    names = [level.within for level in levels]
    if len(set(names)) < len(names) or not all(names) or DEVICE_UNIT in names:
        raise ClusterError(f"levels are {names}\nhint: give each a name of its own, other than {DEVICE_UNIT!r}")
    if NODE not in names or names[-1] != CLUSTER:
        raise ClusterError(f"levels are {names}\nhint: from inside out, name one {NODE!r}, the last {CLUSTER!r}")
    if RAIL in names and (nics is None or names[names.index(RAIL) - 1] != NODE):
        raise ClusterError(f"levels are {names}\nhint: put {RAIL!r} right above {NODE!r}, and give 'nics'")
    for index, level in enumerate(levels):
        known = (DEVICE_UNIT, *(name for name in names[:index] if name != RAIL))
        if level.per and level.per not in known:
            hint = nearest(level.per, known)
            raise ClusterError(f"level {level.within!r} is per {level.per!r}{hint}\nhint: give {' or '.join(known)}")


class Hierarchy:
    """Levels, with the units that each device of a cluster stands in, and links of pairs that are not as the others."""

    def __init__(
        self, devices: Sequence[Device], levels: Sequence[Level], nics: Nics | None, pairs: Sequence[PairLink] = ()
    ) -> None:
        """Raises `ClusterError` for a device whose place does not fit the levels."""
        _check_levels(levels, nics)
        self._levels, self._nics, self._links = tuple(levels), nics, [level.link for level in levels]
        self._names = [level.within for level in levels]
        self._node = self._names.index(NODE)
        # Rings of a thousand devices are priced again and again.
        self._known_links: dict[tuple[int, int], Link] = {}
        self._known_ends: dict[tuple[int, int], tuple[End, ...]] = {}
        self._known_all_ends: dict[tuple[int, int], tuple[tuple[Place, float], ...]] = {}
        self._ports = {} if nics is None else device_ports(devices, nics)
        self._devices = {device.rank: device for device in devices}
        self._units = {device.rank: self._units_of(device) for device in devices}
        self._check_nodes(devices)
        self._members = _members(self._units, self._ports, devices)
        self._numbers = _numbers(self._members)
        self._known_rings: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._first_rings: dict[Hashable, tuple[int, ...]] = {}
        self._places = {device.rank: self._places_of(device.rank) for device in devices}
        self._pairs = {(pair.of, pair.between): pair.link for pair in pairs}
        self._twins = _twins(self._pairs)
        facts = {
            d.rank: (d.most_bytes_per_second, self.peer(d), *(len(self._members[u]) for u in self._places[d.rank]))
            for d in devices
        }
        kinds = {fact: number for number, fact in enumerate(dict.fromkeys(facts.values()))}
        self._kinds = {rank: kinds[fact] for rank, fact in facts.items()}

    def _units_of(self, device: Device) -> tuple[Unit, ...]:
        wanted = [name for name in self._names if name not in _NAMED]
        strange = [name for name in device.place if name not in wanted]
        missing = [name for name in wanted if name not in device.place]
        if strange or missing:
            what = f"names {strange[0]!r}{nearest(strange[0], wanted)}" if strange else f"lacks {missing[0]!r}"
            raise ClusterError(f"device {device.rank}: its place {what}\nhint: give one of each of the levels {wanted}")
        return tuple(self._unit(device, index) for index in range(len(self._names)))

    def _unit(self, device: Device, index: int) -> Unit:
        """Return the unit of a level: told from those of other nodes inside a node, and of other units outside."""
        name = self._names[index]
        if name == RAIL:
            return RAIL, self._ports[device.rank]
        outer = tuple(device.place[other] for other in self._names[index:] if other not in _NAMED)
        return (name, *outer, device.node) if index <= self._node else (name, *outer)

    def _check_nodes(self, devices: Sequence[Device]) -> None:
        """Raise `ClusterError` where a node stands in two units of a level that is above it."""
        found: dict[str, Unit] = {}
        for device in devices:
            unit = self._units[device.rank][self._node]
            if found.setdefault(device.node, unit) != unit:
                others = [found[device.node][1:-1], unit[1:-1]]
                raise ClusterError(f"node {device.node!r} is in {others[0]} and {others[1]}\nhint: give it one place")

    def _places_of(self, rank: int) -> tuple[Unit, ...]:
        return (*self._units[rank], self._port(rank)) if self._nics is not None else self._units[rank]

    def alike(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first ring that was asked for of those that links know no difference of.

        In these, devices that follow each other send as much, share units in the same way, and these are as large.
        """
        known = self._known_rings.get(ranks)
        if known is None:
            numbers: dict[Unit, int] = {}
            units = itertools.chain.from_iterable(map(self._places.__getitem__, ranks))
            shape = (
                tuple(map(self._kinds.__getitem__, ranks)),
                tuple([numbers.setdefault(u, len(numbers)) for u in units]),
            )
            known = self._known_rings[ranks] = self._first_rings.setdefault(shape, ranks)
        return known

    def link(self, a: int, b: int) -> Link:
        """Return the link between two devices that meet, as far as both use it."""
        known = self._known_links.get((a, b))
        if known is None:
            known = self._known_links[a, b] = self._link(a, b).between(self._devices[a], self._devices[b])
        return known

    def _link(self, a: int, b: int) -> Link:
        index = self._meeting(a, b)
        pair = self._pair(a, b) if self._pairs and index > self._node else None
        link = pair or self._links[index]
        if self._nics is None or index <= self._node or link.bytes_per_second <= self._nics.bytes_per_second:
            return link
        return Link(self._nics.bytes_per_second, link.latency_seconds)

    def _pair(self, a: int, b: int) -> Link | None:
        """Return the link of two devices' nodes, or else of their kinds, where these are told of as a pair."""
        one, other = self._devices[a], self._devices[b]
        nodes = min(one.node, other.node), max(one.node, other.node)
        kinds = min(one.kind, other.kind), max(one.kind, other.kind)
        return self._pairs.get(("nodes", nodes)) or self._pairs.get(("kinds", kinds))

    def peer(self, device: Device) -> Hashable:
        """Return what devices have in common whose links to all others are alike, wherever these stand."""
        return (self._twins.get(device.node, ""), device.kind) if self._pairs else ""

    def ends(self, a: int, b: int) -> tuple[End, ...]:
        """Return what a message from `a` to `b` shares with those of other devices."""
        known = self._known_ends.get((a, b))
        if known is None:
            index, ways = self._meeting(a, b), ((OUT_OF, a), (INTO, b))
            known = tuple(end for way, rank in ways for end in self._ends(way, rank, index, (a, b)))
            self._known_ends[a, b] = known
        return known

    def all_ends(self, a: int, b: int) -> tuple[tuple[Place, float], ...]:
        """Return all that a message uses, and its bytes per second: what it shares, and links of its devices alone.

        Those inside a node are other ones than outside.
        """
        if (a, b) not in self._known_all_ends:
            speed = self.link(a, b).bytes_per_second
            own = ((place, speed) for place in self._own_ends(a, b))
            self._known_all_ends[a, b] = (*own, *((end.key, end.bytes_per_second) for end in self.ends(a, b)))
        return self._known_all_ends[a, b]

    def _own_ends(self, a: int, b: int) -> tuple[Place, ...]:
        index = self._meeting(a, b)
        if self._levels[index].per not in (("", DEVICE_UNIT) if index <= self._node else (DEVICE_UNIT,)):
            return ()
        out, into = ("out", "in") if index <= self._node else ("network out", "network in")
        return (out, a), (into, b)

    def shared_units(self, rank: int) -> tuple[Place, ...]:
        """Return the units that a device stands in whose links may be shared, by name and number; its node first."""
        own = self._units[rank]
        pairs = [(self._names[index], own[index]) for index in range(len(own) - 1) if self._names[index] != RAIL]
        pairs += [(PORT, self._port(rank))] if self._nics is not None else []
        return tuple((name, self._numbers[unit]) for name, unit in sorted(pairs, key=lambda pair: pair[0] != NODE))

    @property
    def link_units(self) -> dict[str, str]:
        """Return by the names of links that units have, as messages use them, what these units are called."""
        links = {self._link_name(i): level.per or NODE for i, level in enumerate(self._levels)} | {PORT: PORT}
        return {f"{way} {name}": unit for way in (OUT_OF, INTO) for name, unit in links.items()}

    def _ends(self, way: str, rank: int, index: int, pair: tuple[int, int]) -> Iterator[End]:
        for crossed, level in enumerate(self._levels[: index + 1]):
            if level.per not in ("", DEVICE_UNIT) and (crossed == index or level.within != RAIL):
                unit = self._units[rank][self._names.index(level.per)]
                yield self._end(f"{way} {self._link_name(crossed)}", unit, level.bytes_per_second)
        if index > self._node and self._nics is not None:
            yield self._end(f"{way} {PORT}", self._port(rank), self._nics.bytes_per_second)
        elif index > self._node and not self._levels[index].per:
            node = self._numbers[self._units[rank][self._node]]
            yield End((f"{way} {NODE}", node), self.link(*pair).bytes_per_second, frozenset())

    def _link_name(self, crossed: int) -> str:
        """Return what the link is called by which units reach each other at a level; units may have several."""
        per = self._levels[crossed].per
        if not per:
            return NODE
        is_first = per not in (level.per for level in self._levels[:crossed])
        return per if is_first else f"{per} to {self._names[crossed]}"

    def _end(self, name: str, unit: Unit, bytes_per_second: float) -> End:
        return End((name, self._numbers[unit]), bytes_per_second, self._members[unit])

    def _port(self, rank: int) -> Unit:
        return PORT, self._devices[rank].node, self._ports[rank]

    def _meeting(self, a: int, b: int) -> int:
        """Return the number of the level at which two devices meet."""
        return list(map(eq, self._units[a], self._units[b])).index(True)

    def tiers(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the unit of each of some devices, numbered from 0, at every level that stands inside the next one."""
        found = []
        for index, name in enumerate(self._names[:-1]):
            if name != RAIL:
                numbers: dict[Unit, int] = {}
                found.append(tuple(numbers.setdefault(self._units[rank][index], len(numbers)) for rank in ranks))
        return tuple(dict.fromkeys(found))

    def order(self, rank: int) -> tuple[int, ...]:
        """Return what devices are sorted by to stand beside those that they meet first: units, from outside in."""
        pairs = zip(self._names, self._units[rank], strict=True)
        return tuple(self._numbers[unit] for name, unit in reversed(list(pairs)) if name != RAIL)


def device_ports(devices: Sequence[Device], nics: Nics) -> dict[int, int]:
    """Return the number of the port that each device hangs on; raises `ClusterError` for one that is not there."""
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    found: dict[int, int] = {}
    for members in nodes.values():
        for index, device in enumerate(members):
            found[device.rank] = index * nics.per_node // len(members) if device.nic is None else device.nic
    strange = [rank for rank, port in found.items() if not 0 <= port < nics.per_node]
    if strange:
        raise ClusterError(
            f"device {strange[0]} has nic {found[strange[0]]}, but a node has {nics.per_node}, counted from 0"
        )
    return found


def _twins(pairs: Mapping[tuple[str, tuple[str, str]], Link]) -> dict[str, str]:
    """Return for each node of a pair the first whose links to all others are as its own."""
    links: dict[str, dict[str, Link]] = {}
    for (of, names), link in pairs.items():
        if of == "nodes":
            for one, other in (names, names[::-1]):
                links.setdefault(one, {})[other] = link

    def beside(node: str, other: str) -> dict[str, Link]:
        return {name: link for name, link in links[node].items() if name != other}

    found: dict[str, str] = {}
    for node in links:
        found[node] = next((one for one in found.values() if beside(one, node) == beside(node, one)), node)
    return found


def _numbers(units: Iterable[Unit]) -> dict[Unit, int]:
    """Return the number of each unit among those of its name, in order."""
    counts: Counter[Hashable] = Counter()
    found = {}
    for unit in units:
        found[unit] = counts[unit[0]]
        counts[unit[0]] += 1
    return found


def _members(
    units: Mapping[int, tuple[Unit, ...]], ports: Mapping[int, int], devices: Sequence[Device]
) -> dict[Unit, frozenset[int]]:
    """Return the ranks in each unit, and on each port."""
    found: dict[Unit, set[int]] = {}
    for device in devices:
        own = (*units[device.rank], *([(PORT, device.node, ports[device.rank])] if ports else []))
        for unit in own:
            found.setdefault(unit, set()).add(device.rank)
    return {unit: frozenset(ranks) for unit, ranks in found.items()}
