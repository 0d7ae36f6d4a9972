"""What happens in a step, as activities on devices and links that have names, bytes and memory, and what they tell.

That is seconds, bubbles, bytes per link, memory over time, and a timeline of it all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.simulate.events import Activity, Resource, Times
from hetu_fx.planner.simulate.timeline import Counter, Event, Timeline
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.schedule import Phase

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


_WORK = frozenset(Phase)


@dataclass(frozen=True, slots=True)
class Simulation:
    """A step on paper.

    Attributes:
        timeline: what each device does when, and its memory over time.
        bubbles: by device, the share of its pipeline's time (first forward to last backward) in which it computes
            nothing.
        sent_bytes: by (kind of job, sender, receiver).
        peak_bytes: by device, the most that it holds.
    """

    timeline: Timeline
    bubbles: Mapping[int, float]
    sent_bytes: Mapping[tuple[str, int, int], float]
    peak_bytes: Mapping[int, int]

    @property
    def seconds(self) -> float:
        """Return how long the step takes."""
        return self.timeline.seconds

    @property
    def link_bytes(self) -> dict[tuple[int, int], float]:
        """Return the bytes by (sender, receiver), in their order."""
        links = dict.fromkeys(sorted({(sender, receiver) for _, sender, receiver in self.sent_bytes}), 0.0)
        for (_, sender, receiver), count in self.sent_bytes.items():
            links[sender, receiver] += count
        return links

    def __str__(self) -> str:
        lines = [
            f"device {rank}: bubble {100 * share:.1f} %, peak {self.peak_bytes[rank] / 1e6:.4g} MB"
            for rank, share in self.bubbles.items()
        ]
        links = [f"{a} -> {b}: {count / 1e6:.4g} MB" for (a, b), count in self.link_bytes.items()]
        return "\n".join((f"{self.timeline.name}: {self.seconds * 1e3:.4g} ms", *lines, *links))


def simulation(
    name: str,
    jobs: Sequence[Job],
    times: Sequence[Times],
    lasting: Mapping[int, float],
    groups: Sequence[Sequence[int]],
) -> Simulation:
    """Sum up jobs that ran at these times.

    Args:
        name: of the timeline.
        jobs, times: what ran when.
        lasting: bytes by device that it holds all the time.
        groups: the devices of each pipeline.
    """
    pairs = list(zip(jobs, times, strict=True))
    events = tuple(
        Event(rank, job.name, at.start, at.end, job.kind)
        for job, at in pairs
        if at.end > at.start
        for rank in job.devices
    )
    counters = tuple(Counter(rank, "memory", _memory(rank, pairs, count)) for rank, count in lasting.items())
    sent: dict[tuple[str, int, int], float] = {}
    for job in jobs:
        for sender, receiver, count in job.traffic:
            sent[job.kind, sender, receiver] = sent.get((job.kind, sender, receiver), 0.0) + count
    bubbles = {rank: share for group in groups for rank, share in _bubbles(group, pairs).items()}
    peaks = {counter.device: round(max(value for _, value in counter.values)) for counter in counters}
    return Simulation(Timeline(events, name, counters), dict(sorted(bubbles.items())), sent, peaks)


def _memory(rank: int, pairs: Sequence[tuple[Job, Times]], lasting: float) -> tuple[tuple[float, float], ...]:
    """Return (seconds, bytes) whenever a device's memory changes; what ends makes room for what starts then."""
    changes = [(at.end, 0, job.memory_at_end[rank]) for job, at in pairs if rank in job.memory_at_end]
    changes += [(at.start, 1, job.memory_at_start[rank]) for job, at in pairs if rank in job.memory_at_start]
    held, curve = lasting, [(0.0, lasting)]
    for seconds, _, change in sorted(changes):
        held += change
        curve.append((seconds, held))
    return tuple(curve)


def _bubbles(group: Sequence[int], pairs: Sequence[tuple[Job, Times]]) -> dict[int, float]:
    busy = dict.fromkeys(group, 0.0)
    own = [(job, at) for job, at in pairs if job.kind in _WORK and not busy.keys().isdisjoint(job.devices)]
    if not own:
        return dict.fromkeys(group, 0.0)
    seconds = max(at.end for _, at in own) - min(at.start for _, at in own)
    for job, _ in own:
        for rank in job.devices:
            busy[rank] += job.activity.seconds * job.activity.uses.get(("compute", rank), 0.0)
    return {rank: 1 - spent / seconds if seconds else 0.0 for rank, spent in busy.items()}
