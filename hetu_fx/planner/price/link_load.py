"""What messages want of links: who sends how much to whom, and for how long that keeps each link busy.

Which links a message uses, and which of them devices share, is for the cluster to say: of each device, port, node,
rack, each direction by itself. What is priced alone, and what a simulation plays side by side, count them alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.states import Duplicate, Split
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.cluster.topology import Level, Nics, Place
from hetu_fx.comm_ops.plans.algorithm import by_node, lanes, spans
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_on_links
from hetu_fx.comm_ops.plans.cost import messages_cost, ring_cost, two_level_ring_cost
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Stage

Resource = Place
"""What is shared, and of which device, node, rack: ("compute", 3), ("out of node", 0)."""

Traffic = tuple[tuple[int, int, float], ...]
"""(sender, receiver, bytes)."""


def resource_loads(traffic: Traffic, cluster: Cluster) -> dict[Resource, float]:
    """Return the seconds for which messages keep each resource busy, if it does nothing else.

    A CPU copies what it sends and receives itself, as fast as it reaches its neighbours.
    """
    loads: dict[Resource, float] = {}
    devices = map(cluster.device, dict.fromkeys(rank for message in traffic for rank in message[:2]))
    copying = {one.rank: cluster.intra.between(one).bytes_per_second for one in devices if one.kind == "cpu"}
    for sender, receiver, size in traffic:
        for end, bytes_per_second in cluster.all_ends(sender, receiver):
            loads[end] = loads.get(end, 0.0) + size / bytes_per_second
        for rank in (sender, receiver) if copying else ():
            if rank in copying:
                loads["compute", rank] = loads.get(("compute", rank), 0.0) + size / copying[rank]
    return loads


def ring_traffic(rings: Iterable[Sequence[int]], num_bytes: float, turns: int) -> Traffic:
    """Return what goes around rings, each of which has `num_bytes` in all: each turn all parts but one's own."""
    return tuple(
        (rank, ring[(index + 1) % len(ring)], turns * num_bytes * (len(ring) - 1) / len(ring))
        for ring in rings
        if len(ring) > 1
        for index, rank in enumerate(ring)
    )


def turn_traffic(ring: Sequence[int], num_bytes: float, turns: int, cluster: Cluster) -> Traffic:
    """Return what collectives of `num_bytes` in all send, in the algorithm that is taken on the links.

    In two levels each byte goes around every node, and once around the nodes, cut in the lanes of these.
    """
    nodes = tuple(map(cluster.node_of, ring))
    if not spans(nodes) or ring_cost(num_bytes, ring, cluster) <= two_level_ring_cost(num_bytes, ring, cluster):
        return ring_traffic([ring], num_bytes, turns)
    levels = by_node(tuple(ring), nodes)
    across = lanes(levels)
    return ring_traffic(levels, num_bytes, turns) + ring_traffic(across, num_bytes / len(across), turns)


@dataclass(frozen=True, slots=True)
class HandOver:
    """What goes from one stage to another for a micro-batch: rounds of messages, one after the other.

    Attributes:
        rounds: (sender, receiver, share of the value) of each.
        lines: of each, latency with what its devices lose to meet, and seconds by the bytes of the value.
    """

    rounds: tuple[Traffic, ...]
    lines: tuple[Line, ...]

    def traffic(self, number: int, num_bytes: float) -> Traffic:
        """Return the messages of a round, of a value of so many bytes."""
        return tuple((sender, receiver, share * num_bytes) for sender, receiver, share in self.rounds[number])

    def on(self, ranks: Sequence[int]) -> HandOver:
        """Return the same between these ranks instead of their numbers."""
        rounds = (tuple((ranks[a], ranks[b], share) for a, b, share in messages) for messages in self.rounds)
        return HandOver(tuple(rounds), self.lines)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Two stages by all that their hand-over depends on, which is the same for many.

    Attributes:
        axes: of the sender and of the receiver, as in `Stage.axes`.
        entries, itemsize: of the value.
        units: of each device, those whose links may be shared, its node first; of each name numbered from 0 in order.
        facts: what links and meetings know of each device.
        levels, nics: what links units.
        links: between the first devices of each two nodes, and inside each node.
        cluster, ranks: where they are.
    """

    axes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    entries: int
    itemsize: int
    units: tuple[tuple[int, ...], ...]
    facts: tuple[tuple[float | None, float, bool, int | None], ...]
    levels: tuple[Level, ...]
    nics: Nics | None
    links: tuple[Link, ...]
    cluster: Cluster = field(compare=False)
    ranks: tuple[int, ...] = field(compare=False)

    @classmethod
    def of(cls, stage: Stage, other: Stage, num_bytes: float, cluster: Cluster) -> _Ends:
        ranks = (*stage.devices, *other.devices)
        units = tuple(zip(*map(_renumbered, zip(*map(cluster.shared_units, ranks), strict=True)), strict=True))
        nodes = [own[0] for own in units]
        firsts = [ranks[nodes.index(node)] for node in dict.fromkeys(nodes)]
        devices = [cluster.device(rank) for rank in ranks]
        entries = _entries(stage, other)
        return cls(
            axes=(stage.axes, other.axes),
            entries=entries,
            itemsize=max(1, round(num_bytes / entries)),
            units=units,
            facts=tuple([(one.bytes_per_second, one.meeting_now, one.kind == "cpu", one.nic) for one in devices]),
            levels=cluster.levels,
            nics=cluster.nics,
            links=tuple([cluster.link(a, b) for a, b in itertools.combinations_with_replacement(firsts, 2)]),
            cluster=cluster,
            ranks=ranks,
        )

    @property
    def move(self) -> TensorMove:
        """Return the move of the value, between ranks that are the devices' numbers."""
        source, target = self.axes
        split = len(source[0]) * len(source[1])
        held = _held(range(split), *source), _held(range(split, len(self.ranks)), *target)
        return TensorMove(*held, (self.entries,), self.itemsize)

    @property
    def devices(self) -> Cluster:
        """Return the devices alone, with their numbers as ranks."""
        devices = (replace(self.cluster.device(rank), rank=number) for number, rank in enumerate(self.ranks))
        return replace(self.cluster, devices=tuple(devices), collectives=())


def _renumbered(places: Sequence[Place]) -> tuple[int, ...]:
    """Return which of some devices' units are the same, by numbers from 0 in order."""
    numbers: dict[Place, int] = {}
    return tuple([numbers.setdefault(place, len(numbers)) for place in places])


_MANY = 720
"""Entries, at least, of a value that hand-overs are planned for: slices of it are about as large as they should be."""


def _entries(*stages: Stage) -> int:
    """Return so many entries that each shard of a sequence has a whole number of them."""
    least = math.lcm(*(sum(stage.axes[0]) for stage in stages))
    return least * math.ceil(_MANY / least)


def _held(ranks: Sequence[int], sequence: tuple[int, ...], tensor: tuple[int, ...]) -> Annotation:
    """Return how a stage's devices hold what is handed over: whole, or a shard of the sequence."""
    return Annotation.on(ranks, Split(0, sequence), Duplicate(len(tensor)))


@lru_cache(maxsize=65536)
def _planned(ends: _Ends) -> HandOver:
    """Plan the messages between devices that are numbered in order."""
    cluster = ends.devices
    plan = plan_on_links([ends.move], cluster)
    whole = ends.entries * ends.itemsize
    found = [tuple((a, b, size / whole) for a, b, size in one.messages) for one in plan.rounds if one.messages]
    return HandOver(tuple(found), tuple(_line(messages, cluster) for messages in found))


def _line(messages: Traffic, cluster: Cluster) -> Line:
    empty = messages_cost(((sender, receiver, 0.0) for sender, receiver, _ in messages), cluster)
    met = max(cluster.meeting_seconds((sender, receiver)) for sender, receiver, _ in messages)
    return Line(empty + met, max(resource_loads(messages, cluster).values()))


def price_hand_over(stage: Stage, other: Stage, num_bytes: float, cluster: Cluster) -> HandOver:
    """Return how a value of so many bytes goes from one stage to another, as the runtime sends it.

    Each receiver gets what it lacks from one of its owners, neighbours first; where several on a node get the same from
    another node, each may get a slice, and pass it on inside (H2's slice-send then gather), where that is cheaper.
    """
    ends = _Ends.of(stage, other, num_bytes, cluster)
    return _planned(ends).on(ends.ranks)


def hand_over_line(stage: Stage, other: Stage, bytes_per_row: float, cluster: Cluster, rows: int = 1) -> Line:
    """Return the seconds of a hand-over by the rows of a micro-batch, sent in the way of so many rows."""
    lines = _planned(_Ends.of(stage, other, rows * bytes_per_row, cluster)).lines
    return Line(sum(line.fixed for line in lines), sum(line.slope for line in lines) * bytes_per_row)
