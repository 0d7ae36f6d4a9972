"""What happens in a step, as activities on devices and links that have names, bytes and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.simulate.events import Activity, Resource
from hetu_fx.planner.values.line import Line

Traffic = tuple[tuple[int, int, float], ...]
"""(sender, receiver, bytes)."""


@dataclass(frozen=True, slots=True)
class Job:
    """An activity, and what it is.

    Attributes:
        activity: its seconds, what it uses and what it waits for.
        kind: groups jobs in pictures ("forward", "send").
        name: tells them apart.
        devices: whose it is.
        traffic: what it sends.
        memory_at_start, memory_at_end: bytes that devices hold more from then on.
    """

    activity: Activity
    kind: str
    name: str
    devices: tuple[int, ...]
    traffic: Traffic = ()
    memory_at_start: Mapping[int, float] = field(default_factory=dict)
    memory_at_end: Mapping[int, float] = field(default_factory=dict)


class Jobs:
    """Jobs as they are added, numbered in order."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.all: list[Job] = []

    def add(self, job: Job) -> int:
        """Add a job; return its number."""
        self.all.append(job)
        return len(self.all) - 1

    def compute(
        self,
        kind: str,
        name: str,
        seconds: Mapping[int, float],
        after: Iterable[int],
        start: Mapping[int, float] | None = None,
        end: Mapping[int, float] | None = None,
    ) -> int:
        """Add work that devices do together, the slowest setting the pace."""
        slowest = max(seconds.values())
        uses: dict[Resource, float] = {("compute", d): own / slowest for d, own in seconds.items() if own}
        activity = Activity(slowest, uses, tuple(after))
        return self.add(Job(activity, kind, name, tuple(seconds), (), start or {}, end or {}))

    def transfer(
        self,
        kind: str,
        name: str,
        line: Line,
        traffic: Traffic,
        after: Iterable[int],
        devices: Sequence[int] = (),
        start: Mapping[int, float] | None = None,
        end: Mapping[int, float] | None = None,
    ) -> int:
        """Add a message or a collective that takes `line.fixed` seconds of latency and `line.per_row` for its bytes."""
        loads = loads_of(traffic, self.cluster)
        seconds = max(line.slope, *loads.values(), 0.0) if loads else line.slope
        uses = {resource: min(1.0, load / seconds) for resource, load in loads.items() if load}
        activity = Activity(seconds, uses, tuple(after), line.fixed)
        shown = tuple(devices) or tuple(dict.fromkeys(sender for sender, _, _ in traffic))
        return self.add(Job(activity, kind, name, shown, traffic, start or {}, end or {}))


def loads_of(traffic: Traffic, cluster: Cluster) -> dict[Resource, float]:
    """Return the seconds for which messages keep each resource busy, if it does nothing else.

    Messages use one direction of each end's link, across nodes that of the nodes, which their devices share. A CPU
    copies what it sends and receives itself, as fast as it reaches its neighbours.
    """
    loads: dict[Resource, float] = {}

    def add(resource: Resource, seconds: float) -> None:
        loads[resource] = loads.get(resource, 0.0) + seconds

    for sender, receiver, size in traffic:
        seconds = size / cluster.bytes_per_second(sender, receiver)
        here, there = cluster.node_of(sender), cluster.node_of(receiver)
        add(*((("out", sender), seconds) if here == there else (("out of node", here), seconds)))
        add(*((("in", receiver), seconds) if here == there else (("into node", there), seconds)))
        for end in (sender, receiver):
            if (device := cluster.device(end)).kind == "cpu":
                add(("compute", end), size / cluster.intra.between(device).bytes_per_second)
    return loads


def ring_traffic(rings: Iterable[Sequence[int]], num_bytes: float, turns: int) -> Traffic:
    """Return what goes around rings, each of which has `num_bytes` in all: each turn all parts but one's own."""
    return tuple(
        (rank, ring[(index + 1) % len(ring)], turns * num_bytes * (len(ring) - 1) / len(ring))
        for ring in rings
        if len(ring) > 1
        for index, rank in enumerate(ring)
    )
