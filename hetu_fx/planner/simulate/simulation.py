"""What a simulated step comes to: seconds and what made them, bubbles, links, memory over time, and a timeline.

A step would take `one_by_one_seconds` if a device did one thing at a time and links had room for all, which is what the
closed form of `price.step` adds up. What it hides is what messages travel beside work, or beside each other; what it
loses is what messages (on CPUs work too) are slowed by others that use the same link at the same time:

    seconds = one_by_one_seconds - hidden_seconds + lost_seconds
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from hetu_fx.base.words import bytes_text, seconds_text
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.link_load import Resource
from hetu_fx.planner.simulate.events import Times
from hetu_fx.planner.simulate.jobs import Job, Jobs
from hetu_fx.plans.schedule import Phase
from hetu_fx.show.lanes import WORK
from hetu_fx.show.timeline import MEMORY, Counter, Event, Timeline

_PHASE = frozenset(Phase)
_PIPELINES: tuple[str, ...] = ("host", *Phase, "send", "communication", "finish")
_PHASES = (("gather", "rows"), _PIPELINES, ("gradients",), ("optimizer",))
"""Kinds of jobs by the part of a step that they stand in: one after the other, if nothing overlaps."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """How busy one direction of a link is.

    Attributes:
        link: whose it is: "out of device 3", "into node 1".
        bytes: that go through it.
        seconds: that they keep it busy for, at its full speed.
        share: of the step.
    """

    link: str
    bytes: float
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a device's step consists of, in seconds.

    Attributes:
        work: it computes.
        messages: it sends, receives, or waits for messages under way.
        hidden: both at once.
        lost: its messages, and its work, took longer than alone as others used the same links.
        idle: neither.
    """

    work: float
    messages: float
    hidden: float
    lost: float
    idle: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A step on paper.

    Attributes:
        timeline: what each device does when, its memory over time, and how busy links are.
        bubbles: by device, the share of its pipeline's time (first forward to last backward) in which it computes
            nothing.
        sent_bytes: by (kind of job, sender, receiver).
        peak_bytes: by device, the most that it holds.
        one_by_one_seconds: what the step would take if a device did one thing at a time, and links had room for all.
        hidden_seconds: how much of that is saved as messages travel beside work, if links had room for all.
        lost_seconds: how much is lost as they have not.
        uses: what the step of each device consists of.
        links: how busy each is, the busiest first.
    """

    timeline: Timeline
    bubbles: Mapping[int, float]
    sent_bytes: Mapping[tuple[str, int, int], float]
    peak_bytes: Mapping[int, int]
    one_by_one_seconds: float = 0.0
    hidden_seconds: float = 0.0
    lost_seconds: float = 0.0
    uses: Mapping[int, DeviceUse] = field(default_factory=dict)
    links: tuple[LinkUse, ...] = ()

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
        return "\n".join(
            (f"{self.timeline.name}: {seconds_text(self.seconds)}", self.why, *self._devices(), *self._links())
        )

    @property
    def why(self) -> str:
        """Return what the seconds come from, in a line."""
        return (
            f"one thing after the other: {seconds_text(self.one_by_one_seconds)}; hidden by overlap: "
            f"{seconds_text(self.hidden_seconds)}; lost by sharing links: {seconds_text(self.lost_seconds)}"
        )

    def _devices(self) -> Iterator[str]:
        for rank, share in self.bubbles.items():
            use = self.uses.get(rank)
            told = f"device {rank}: bubble {100 * share:.1f} %, peak {bytes_text(self.peak_bytes[rank])}"
            spent = {} if use is None else asdict(use)
            seconds = ", ".join(f"{name} {seconds_text(value)}" for name, value in spent.items())
            yield f"{told}; {seconds}" if seconds else told

    def _links(self) -> Iterator[str]:
        for use in self.links:
            time = f"{seconds_text(use.seconds)}, {100 * use.share:.1f} % of the step"
            yield f"{use.link}: {bytes_text(use.bytes)} in {time}"
        for (sender, receiver), count in self.link_bytes.items():
            yield f"{sender} -> {receiver}: {bytes_text(count)}"


def simulation(name: str, played: Jobs, lasting: Mapping[int, float], groups: Sequence[Sequence[int]]) -> Simulation:
    """Play jobs and sum them up.

    Args:
        name: of the timeline.
        played: the jobs.
        lasting: bytes by device that it holds all the time.
        groups: the devices of each pipeline.
    """
    jobs, cluster = played.all, played.cluster
    pairs = list(zip(jobs, played.times(), strict=True))
    events = tuple(
        Event(rank, job.name, at.start, at.end, job.task.kind)
        for job, at in pairs
        if at.end > at.start
        for rank in job.task.devices
    )
    by_rank = _by_rank(pairs)
    memory = tuple(Counter(rank, MEMORY, _memory(rank, by_rank[rank], count)) for rank, count in lasting.items())
    sent: dict[tuple[str, int, int], float] = {}
    for job in jobs:
        for sender, receiver, count in job.task.traffic:
            sent[job.task.kind, sender, receiver] = sent.get((job.task.kind, sender, receiver), 0.0) + count
    bubbles = {rank: share for group in groups for rank, share in _bubbles(group, pairs).items()}
    peaks = {rank: round(max(value for _, value in one.values)) for rank, one in zip(lasting, memory, strict=True)}
    timeline = Timeline(events, name, (*memory, *_busy_counters(pairs)))
    serial, alone, seconds = one_by_one_seconds(jobs), _alone_seconds(jobs), timeline.seconds
    return Simulation(
        timeline,
        bubbles,
        sent,
        peaks,
        serial,
        serial - alone,
        seconds - alone,
        {rank: _device_use(by_rank[rank], seconds) for rank in bubbles},
        _link_uses(jobs, sent, seconds, cluster),
    )


def _alone_seconds(jobs: Sequence[Job]) -> float:
    """Return what a step would take if all links had room for all."""
    ends: list[float] = []
    for job in jobs:
        start = max((ends[other] for other in job.activity.after), default=0.0)
        ends.append(start + job.task.alone_seconds)
    return max(ends, default=0.0)


def one_by_one_seconds(jobs: Sequence[Job]) -> float:
    """Return what a step would take if each device did one thing at a time, and pipelines' links had room for all.

    A message is then part of what has made it; parameters are gathered before all work, gradients travel after it, and
    share links with each other.
    """
    sent = [0.0] * len(jobs)
    for job in jobs:
        if job.part_of is not None:
            sent[job.part_of] += job.task.alone_seconds
    ends, base = [0.0] * len(jobs), 0.0
    for kinds in _PHASES:
        free: dict[int, float] = {}
        busy: defaultdict[Resource, float] = defaultdict(float)
        for number, job in enumerate(jobs):
            if job.task.kind in kinds:
                waits = (ends[other] for other in job.activity.after)
                start = max(base, *(free.get(rank, 0.0) for rank in job.task.devices), *waits)
                if job.part_of is not None:
                    ends[number] = ends[job.part_of]
                    continue
                ends[number] = start + job.task.alone_seconds + sent[number]
                free |= dict.fromkeys(job.task.devices, ends[number])
                if kinds != _PIPELINES:
                    for resource, share in job.task.uses.items():
                        busy[resource] += share * job.task.seconds
        base = max(base + max(busy.values(), default=0.0), *ends, base)
    return base


Pairs = Sequence[tuple[Job, Times]]
Spans = list[tuple[float, float]]


def _by_rank(pairs: Pairs) -> Mapping[int, Pairs]:
    """Return what ran on each device, or changed its memory."""
    found: defaultdict[int, list[tuple[Job, Times]]] = defaultdict(list)
    for job, at in pairs:
        for rank in {*job.task.devices, *job.memory_at_start, *job.memory_at_end}:
            found[rank].append((job, at))
    return found


def _device_use(own: Pairs, step: float) -> DeviceUse:
    work = _union((at.start, at.end) for job, at in own if job.task.kind in WORK)
    sent = _union((at.start, at.end) for job, at in own if job.task.kind not in WORK)
    both = _length(work) + _length(sent) - _length(_union([*work, *sent]))
    lost = sum(max(0.0, at.end - at.start - job.task.alone_seconds) for job, at in own)
    return DeviceUse(_length(work), _length(sent), both, lost, step - _length(_union([*work, *sent])))


def _union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return spans of time that do not overlap, in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


_OWN = {
    "out": "out of device",
    "in": "into device",
    "network out": "to the network out of device",
    "network in": "from the network into device",
}
_COMPUTE = "compute"


def _named(resource: Resource) -> str:
    name, where = resource
    return f"{_OWN.get(name, name)} {where}"


def _link_uses(
    jobs: Sequence[Job], sent: Mapping[tuple[str, int, int], float], step: float, cluster: Cluster
) -> tuple[LinkUse, ...]:
    seconds: dict[Resource, float] = {}
    for job in jobs:
        for resource, share in job.task.uses.items():
            if resource[0] != _COMPUTE:
                seconds[resource] = seconds.get(resource, 0.0) + share * job.task.seconds
    sizes: dict[Resource, float] = {}
    for (_, sender, receiver), count in sent.items():
        for end, _ in cluster.all_ends(sender, receiver):
            sizes[end] = sizes.get(end, 0.0) + count
    order = sorted(seconds, key=lambda resource: (-seconds[resource], resource))
    return tuple(LinkUse(_named(r), sizes.get(r, 0.0), seconds[r], seconds[r] / step if step else 0.0) for r in order)


def _busy_counters(pairs: Pairs) -> Iterator[Counter]:
    """Yield how busy each link is over time: each message as busy as it is on average while it travels."""
    changes: dict[Resource, list[tuple[float, float]]] = {}
    for job, at in pairs:
        start = at.start + job.task.latency_seconds
        for resource, share in job.task.uses.items():
            if resource[0] != _COMPUTE and at.end > start:
                part = share * job.task.seconds / (at.end - start)
                changes.setdefault(resource, []).extend(((start, part), (at.end, -part)))
    for resource in sorted(changes):
        yield Counter(None, f"{_named(resource)} is busy", _steps(0.0, changes[resource]))


def _steps(value: float, changes: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return (seconds, value) after each change, those of one time together."""
    found = [(0.0, value)]
    for seconds, change in sorted(changes):
        value += change
        found.append((seconds, value))
    return tuple(one for one, after in pairwise([*found, (float("inf"), 0.0)]) if one[0] != after[0])


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
    own = [(job, at) for job, at in pairs if job.task.kind in _PHASE and not busy.keys().isdisjoint(job.task.devices)]
    if not own:
        return dict.fromkeys(group, 0.0)
    seconds = max(at.end for _, at in own) - min(at.start for _, at in own)
    for job, _ in own:
        for rank in job.task.devices:
            busy[rank] += job.task.seconds * job.task.uses.get(("compute", rank), 0.0)
    return {rank: 1 - spent / seconds if seconds else 0.0 for rank, spent in busy.items()}
