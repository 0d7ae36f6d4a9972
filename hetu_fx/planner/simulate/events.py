"""Play activities on shared resources: who runs when, if each gets its fair part of what it uses.

An activity starts when those it waits for have ended. Alone it takes `seconds`, in which it uses a share of each of
its resources (a device's compute, one direction of a link). Where shares add up to more than a resource has, all that
use it are slowed until none gets a smaller part of its own full speed than it must (dominant resource fairness,
Ghodsi et al., NSDI 2011).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hetu_fx.errors import StateError

Resource = tuple[str, int]
"""What is shared, and of which device or node: ("compute", 3), ("out of node", 0)."""

_FULL = 1e-9  # what is left of a resource when it counts as used up
_MOST = 1.0 + _FULL  # what may be wanted of a resource without anybody being slowed

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Activity:
    """Work on resources.

    Attributes:
        seconds: how long it takes when nothing else wants its resources.
        uses: the share of each resource that it takes then, above 0; above 1 where it stands for several that are
            alike, which then slow each other.
        after: numbers of the activities that it waits for.
        latency_seconds: what it takes before that, using nothing.
    """

    seconds: float
    uses: Mapping[Resource, float] = field(default_factory=dict)
    after: tuple[int, ...] = ()
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.seconds < math.inf and 0 <= self.latency_seconds < math.inf):
            times = self.seconds, self.latency_seconds
            raise StateError(f"an activity takes {times} seconds\nhint: give finite numbers from 0")
        if self.uses and not 0 < min(self.uses.values()) <= max(self.uses.values()) < math.inf:
            raise StateError(f"an activity uses {dict(self.uses)}\nhint: give finite shares above 0")


@dataclass(frozen=True, slots=True)
class Times:
    """When an activity started (its latency included) and ended, in seconds."""

    start: float
    end: float


def play(activities: Sequence[Activity]) -> tuple[Times, ...]:
    """Return when each activity runs, from second 0. Raises `StateError` where some wait for each other."""
    run = _EventReplay(activities)
    run.play()
    waiting = [number for number, times in enumerate(run.times) if times is None]
    if waiting:
        raise StateError(f"activities {waiting[:8]} wait for each other: an order of work that cannot be kept")
    return tuple(times for times in run.times if times is not None)


def fair_rates(uses: Mapping[int, Mapping[T, float]]) -> dict[int, float]:
    """Return the part of its full speed that each activity gets, all raised alike until a resource is used up."""
    left: dict[T, float] = dict.fromkeys((r for shares in uses.values() for r in shares), 1.0)
    rates: dict[int, float] = {}
    level, rising = 0.0, dict(uses)
    while rising:
        load: dict[T, float] = dict.fromkeys(left, 0.0)
        for shares in rising.values():
            for resource, share in shares.items():
                load[resource] += share
        step = min((left[r] / load[r] for r in left if load[r]), default=1.0)
        level = min(1.0, level + step)
        left = {resource: left[resource] - step * load[resource] for resource in left}
        full = {resource for resource in left if left[resource] < _FULL}
        stopped = [a for a, shares in rising.items() if level == 1.0 or not full.isdisjoint(shares)]
        for activity in stopped:
            rates[activity] = level
            del rising[activity]
    return rates


@dataclass(slots=True)
class _Running:
    """An activity that uses its resources: seconds of full speed still to do at a time, and its rate since."""

    left: float
    since: float
    rate: float = 0.0
    version: int = 0

    @property
    def end(self) -> float:
        return self.since + self.left / self.rate

    def change(self, rate: float, now: float) -> None:
        self.left = max(0.0, self.left - (now - self.since) * self.rate)
        self.since, self.rate, self.version = now, rate, self.version + 1


class _EventReplay:
    """The state of a play. Events are (seconds, activity, version): its latency is over (-1), or it is done.

    Resources are numbered. `_wanted` is the share of each that its users would take at full speed: one of which no more
    is wanted than there is slows nobody, so that only users of others are looked at when something starts or ends.
    """

    def __init__(self, activities: Sequence[Activity]) -> None:
        self._activities = activities
        self._missing = [len(set(activity.after)) for activity in activities]
        self._followers: list[list[int]] = [[] for _ in activities]
        for number, activity in enumerate(activities):
            for other in set(activity.after):
                self._followers[other].append(number)
        numbers: dict[Resource, int] = {}
        known: dict[int, dict[int, float]] = {}  # activities that are alike have one mapping
        for activity in activities:
            if id(activity.uses) not in known:
                uses = activity.uses.items()
                known[id(activity.uses)] = {numbers.setdefault(name, len(numbers)): share for name, share in uses}
        self._uses = [known[id(activity.uses)] for activity in activities]
        self._starts = [0.0] * len(activities)
        self._running: dict[int, _Running] = {}
        self._users: list[set[int]] = [set() for _ in numbers]
        self._wanted = [0.0] * len(numbers)
        self._events: list[tuple[float, int, int]] = []
        self.times: list[Times | None] = [None] * len(activities)

    def play(self) -> None:
        for number, missing in enumerate(self._missing):
            if not missing:
                self._begin(number, 0.0)
        events = self._events
        while events:
            now = events[0][0]
            touched: set[int] = set()  # resources of which more is, or was, wanted than there is
            fresh: list[int] = []
            while events and events[0][0] == now:
                _, number, version = heapq.heappop(events)
                if version == -1:
                    self._start(number, now, touched)
                    fresh.append(number)
                elif number in self._running and self._running[number].version == version:
                    self._end(number, now, touched)
            self._share(touched, fresh, now)

    def _begin(self, number: int, now: float) -> None:
        self._starts[number] = now
        heapq.heappush(self._events, (now + self._activities[number].latency_seconds, number, -1))

    def _start(self, number: int, now: float, touched: set[int]) -> None:
        """Let an activity use its resources."""
        self._running[number] = _Running(self._activities[number].seconds, now)
        for resource, share in self._uses[number].items():
            self._users[resource].add(number)
            self._wanted[resource] += share
            if self._wanted[resource] > _MOST:
                touched.add(resource)

    def _end(self, number: int, now: float, touched: set[int]) -> None:
        del self._running[number]
        for resource, share in self._uses[number].items():
            self._users[resource].discard(number)
            if self._wanted[resource] > _MOST:
                touched.add(resource)
            self._wanted[resource] -= share
        self.times[number] = Times(self._starts[number], now)
        for follower in self._followers[number]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._begin(follower, now)

    def _share(self, touched: Iterable[int], fresh: Iterable[int], now: float) -> None:
        """Work out the rates of what has just started, and of all that have to do with these resources."""
        group: set[int] = set()
        queue = list(touched)
        seen = set(queue)
        while queue:
            for number in self._users[queue.pop()]:
                if number not in group:
                    group.add(number)
                    others = [r for r in self._uses[number] if r not in seen and self._wanted[r] > _MOST]
                    seen.update(others)
                    queue.extend(others)
        if group:
            rates = fair_rates({number: self._scarce(number) for number in sorted(group)})
            for number, rate in rates.items():
                self._set_rate(number, rate, now)
        for number in fresh:
            if number not in group:
                self._set_rate(number, 1.0, now)

    def _scarce(self, number: int) -> dict[int, float]:
        return {r: share for r, share in self._uses[number].items() if self._wanted[r] > _MOST}

    def _set_rate(self, number: int, rate: float, now: float) -> None:
        running = self._running[number]
        if running.rate != rate:
            running.change(rate, now)
            heapq.heappush(self._events, (running.end, number, running.version))
