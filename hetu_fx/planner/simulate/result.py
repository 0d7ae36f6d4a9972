"""What a simulated step says: seconds, bubbles, bytes per link, memory over time, and a timeline of it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetu_fx.planner.simulate.events import Times
from hetu_fx.planner.simulate.jobs import Job
from hetu_fx.planner.simulate.timeline import Counter, Event, Timeline
from hetu_fx.plans.schedule import Phase

_WORK = frozenset(Phase)


@dataclass(frozen=True, slots=True)
class Simulation:
    """A step on paper.

    Attributes:
        timeline: what each device does when, and its memory over time.
        bubbles: by device, the share of its pipeline's time (first forward to last backward) in which it computes
            nothing.
        link_bytes: by (sender, receiver).
        peak_bytes: by device, the most that it holds.
    """

    timeline: Timeline
    bubbles: Mapping[int, float]
    link_bytes: Mapping[tuple[int, int], float]
    peak_bytes: Mapping[int, int]

    @property
    def seconds(self) -> float:
        """Return how long the step takes."""
        return self.timeline.seconds

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
    links: dict[tuple[int, int], float] = {}
    for job in jobs:
        for sender, receiver, count in job.traffic:
            links[sender, receiver] = links.get((sender, receiver), 0.0) + count
    bubbles = {rank: share for group in groups for rank, share in _bubbles(group, pairs).items()}
    peaks = {counter.device: round(max(value for _, value in counter.values)) for counter in counters}
    return Simulation(
        Timeline(events, name, counters), dict(sorted(bubbles.items())), dict(sorted(links.items())), peaks
    )


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
