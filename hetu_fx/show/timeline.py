"""Timelines: what each device did, or will do, and when.

Measured steps and simulated ones are the same type, so they can be laid side by side. Timelines become a Chrome trace,
which Perfetto and chrome://tracing read, or a page of lanes (`hetu_fx.show.lanes`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetu_fx.base.documents import write_atomically
from hetu_fx.base.words import seconds_text
from hetu_fx.errors import StateError
from hetu_fx.show.lanes import lanes_html
from hetu_fx.show.markup import alone


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a device (rank) did; `kind` groups events, `name` tells them apart, `facts` are for the trace."""

    device: int
    name: str
    start_seconds: float
    end_seconds: float
    kind: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_seconds) and math.isfinite(self.end_seconds)):
            raise StateError(f"event {self.name!r} of device {self.device} has no finite time: {self}")
        if self.end_seconds < self.start_seconds:
            raise StateError(
                f"event {self.name!r} of device {self.device} ends at {self.end_seconds} s, before it "
                f"starts at {self.start_seconds} s\nhint: take both times from one clock"
            )

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return self.end_seconds - self.start_seconds


MEMORY = "memory"
"""The name of the counter that tells the bytes which a device holds."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A number over time: (seconds, value) in order, each value until the next; of a device (rank), or of none."""

    device: int | None
    name: str
    values: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        times = [seconds for seconds, _ in self.values]
        if times != sorted(times) or not all(math.isfinite(number) for pair in self.values for number in pair):
            raise StateError(f"counter {self.label!r} has values that are not finite or in order")

    @property
    def label(self) -> str:
        """Return its name, with its device."""
        return self.name if self.device is None else f"{self.name} of device {self.device}"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events in order of device and start. Events of one device may touch, nest or overlap."""

    events: tuple[Event, ...]
    name: str = "hetu_fx"
    counters: tuple[Counter, ...] = ()

    def __post_init__(self) -> None:
        order = sorted(self.events, key=lambda e: (e.device, e.start_seconds, -e.end_seconds, e.name))
        object.__setattr__(self, "events", tuple(order))

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the ranks that have events, in order."""
        return tuple(dict.fromkeys(event.device for event in self.events))

    @property
    def seconds(self) -> float:
        """Return the time from the first start to the last end."""
        if not self.events:
            return 0.0
        return max(e.end_seconds for e in self.events) - min(e.start_seconds for e in self.events)

    @property
    def start_seconds(self) -> float:
        """Return when the first event starts."""
        return min((event.start_seconds for event in self.events), default=0.0)

    @property
    def memory(self) -> dict[int, tuple[tuple[float, float], ...]]:
        """Return what each device holds over time, as (seconds, bytes)."""
        return {one.device: one.values for one in self.counters if one.device is not None and one.name == MEMORY}

    def of(self, device: int) -> tuple[Event, ...]:
        """Return the events of one device, by start."""
        return tuple(event for event in self.events if event.device == device)

    def busy_seconds(self, device: int) -> float:
        """Return how long the device was in at least one event."""
        busy, until = 0.0, -math.inf
        for event in self.of(device):
            busy += max(0.0, event.end_seconds - max(event.start_seconds, until))
            until = max(until, event.end_seconds)
        return busy

    def idle_share(self, device: int) -> float:
        """Return the share of the whole time in which the device was in no event."""
        return 1.0 - self.busy_seconds(device) / self.seconds if self.seconds else 0.0

    def write_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write it as a Chrome trace, atomically."""
        write_trace(path, [self])

    def _repr_html_(self) -> str:
        """Return the lanes for notebooks."""
        return alone(lanes_html(self))

    def __str__(self) -> str:
        rows = [f"device {d}: busy {seconds_text(self.busy_seconds(d))}" for d in self.devices]
        return "\n".join((f"{self.name}: {seconds_text(self.seconds)}", *rows))


def write_trace(path: str | os.PathLike[str], timelines: Sequence[Timeline]) -> None:
    """Write timelines as one Chrome trace (JSON), which Perfetto and chrome://tracing read; atomically."""
    write_atomically(path, json.dumps(chrome_trace(timelines)) + "\n")


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return a Chrome trace: a process for each timeline, a thread for each device.

    Times are in microseconds from the start of the first timeline.
    """
    start = min((one.start_seconds for one in timelines if one.events), default=0.0)
    events = [event for number, one in enumerate(timelines) for event in _trace_events(number, one, start)]
    return {"displayTimeUnit": "ms", "otherData": {"name": _names(timelines)}, "traceEvents": events}


def _names(timelines: Sequence[Timeline]) -> str:
    return "; ".join(one.name for one in timelines)


def _trace_events(process: int, timeline: Timeline, start: float) -> Iterator[dict[str, Any]]:
    """Yield what names the process and its threads, then its counters and its events."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": timeline.name}}
    for device in timeline.devices:
        name = {"name": f"device {device}"}
        yield {"ph": "M", "pid": process, "tid": device, "name": "thread_name", "args": name}
    for one in timeline.counters:
        for seconds, value in one.values:
            at = (seconds - start) * 1e6
            yield {"ph": "C", "pid": process, "name": one.label, "ts": at, "args": {one.name: value}}
    for event in timeline.events:
        what = {"name": event.name, "cat": event.kind or "other", "args": dict(event.facts)}
        times = {"ts": (event.start_seconds - start) * 1e6, "dur": event.seconds * 1e6}
        yield {"ph": "X", "pid": process, "tid": event.device, **what, **times}
