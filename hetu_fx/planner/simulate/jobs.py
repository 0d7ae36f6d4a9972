"""What happens in a step, as activities on devices and links that have names, bytes and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.link_load import Resource, Traffic, resource_loads
from hetu_fx.planner.simulate.events import Activity, Times, play
from hetu_fx.planner.simulate.fold import Folding, unfold
from hetu_fx.planner.values.line import Line


@dataclass(frozen=True, slots=True)
class Task:
    """What several jobs do alike, for one micro-batch after another.

    Attributes:
        kind: groups jobs in pictures ("forward", "send").
        devices: whose it is.
        seconds, uses, latency_seconds: of its activity.
        traffic: what it sends.
    """

    kind: str
    devices: tuple[int, ...]
    seconds: float
    uses: Mapping[Resource, float]
    latency_seconds: float = 0.0
    traffic: Traffic = ()

    def part(self, share: float) -> Task:
        """Return so much of it."""
        traffic = tuple((sender, receiver, share * size) for sender, receiver, size in self.traffic)
        latency = share * self.latency_seconds
        return Task(self.kind, self.devices, share * self.seconds, self.uses, latency, traffic)

    def seen(self, share: float) -> Task:
        """Return it with so much of its seconds and all of its bytes: the rest travels beside other work."""
        return replace(self, seconds=share * self.seconds)

    @property
    def alone_seconds(self) -> float:
        """Return how long it takes if nothing else wants its resources."""
        return self.latency_seconds + self.seconds


@dataclass(frozen=True, slots=True)
class Job:
    """A task that is done once.

    Attributes:
        task: what it is.
        name: tells it apart.
        activity: with what it waits for.
        memory_at_start, memory_at_end: bytes that devices hold more from then on.
        part_of: the job that it belongs to, if devices did one thing at a time: a message to what has made it.
    """

    task: Task
    name: str
    activity: Activity
    memory_at_start: Mapping[int, float] = field(default_factory=dict)
    memory_at_end: Mapping[int, float] = field(default_factory=dict)
    part_of: int | None = None


class Jobs:
    """Jobs as they are added, numbered in order."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.all: list[Job] = []

    def do(
        self,
        task: Task,
        name: str,
        after: Iterable[int],
        start: Mapping[int, float] | None = None,
        end: Mapping[int, float] | None = None,
        part_of: int | None = None,
    ) -> int:
        """Add a task that waits for these jobs; return its number."""
        activity = Activity(task.seconds, task.uses, tuple(after), task.latency_seconds)
        self.all.append(Job(task, name, activity, start or {}, end or {}, part_of))
        return len(self.all) - 1

    def times(self) -> tuple[Times, ...]:
        """Return when each job runs. Raises `StateError` where some wait for each other."""
        return play([job.activity for job in self.all])

    def seconds(self) -> float:
        """Return when the last job ends, from second 0."""
        return max(at.end for at in self.times())

    def compute(self, kind: str, seconds: Mapping[int, float]) -> Task:
        """Return work that devices do together, the slowest setting the pace."""
        slowest = max(seconds.values())
        uses: dict[Resource, float] = {("compute", d): own / slowest for d, own in seconds.items() if own}
        return Task(kind, tuple(seconds), slowest, uses)

    def transfer(
        self, kind: str, line: Line, traffic: Traffic, devices: Sequence[int] = (), folded: Folding = unfold
    ) -> Task:
        """Return a message or a collective of `line.fixed` seconds of latency, and `line.slope` for its bytes."""
        loads = resource_loads(traffic, self.cluster)
        seconds = max(line.slope, *loads.values(), 0.0) if loads else line.slope
        uses = {resource: load / seconds for resource, load in folded(loads).items() if load}
        shown = tuple(devices) or tuple(dict.fromkeys(sender for sender, _, _ in traffic))
        return Task(kind, shown, seconds, uses, line.fixed, traffic)
