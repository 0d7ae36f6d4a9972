"""Timelines: what each device did, or will do, and when.

Measured steps and simulated ones are the same type, so they can be laid side by side. A timeline becomes a
Chrome trace (chrome://tracing, Perfetto), a picture, or a page (`hetu_fx.planner.simulate.timeline_picture`).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from hetu_fx.base.documents import write_atomically
from hetu_fx.base.words import seconds_text
from hetu_fx.errors import EnvironmentProblem, StateError
from hetu_fx.planner.simulate.timeline_picture import draw


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a device (rank) did; `kind` groups events, `name` tells them apart."""

    device: int
    name: str
    start_seconds: float
    end_seconds: float
    kind: str = ""

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

    def to_chrome(self) -> dict[str, Any]:
        """Return a Chrome trace: one process, one thread per device, times in microseconds from the start."""
        start = self.start_seconds
        names = [_thread_name(device) for device in self.devices]
        values = [value for counter in self.counters for value in _chrome_values(counter, start)]
        return {
            "displayTimeUnit": "ms",
            "otherData": {"name": self.name},
            "traceEvents": [*names, *values, *(_chrome_event(event, start) for event in self.events)],
        }

    def write_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the Chrome trace as JSON, atomically."""
        write_atomically(path, json.dumps(self.to_chrome()) + "\n")

    def write_png(self, path: str | os.PathLike[str]) -> None:
        """Draw the timeline, a row per device, and what each holds. Raises `EnvironmentProblem` without matplotlib."""
        draw(self, os.fspath(path))

    def _repr_png_(self) -> bytes | None:
        """Return the picture for notebooks, which show the text where there is none."""
        drawn = BytesIO()
        try:
            draw(self, drawn)
        except EnvironmentProblem:
            return None
        return drawn.getvalue()

    def __str__(self) -> str:
        rows = [f"device {d}: busy {seconds_text(self.busy_seconds(d))}" for d in self.devices]
        return "\n".join((f"{self.name}: {seconds_text(self.seconds)}", *rows))


def _thread_name(device: int) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": device, "name": "thread_name", "args": {"name": f"device {device}"}}


def _chrome_event(event: Event, start: float) -> dict[str, Any]:
    times = {"ts": (event.start_seconds - start) * 1e6, "dur": event.seconds * 1e6}
    return {
        "ph": "X",
        "pid": 0,
        "tid": event.device,
        "name": event.name,
        "cat": event.kind or "other",
        **times,
    }


def _chrome_values(counter: Counter, start: float) -> list[dict[str, Any]]:
    return [
        {"ph": "C", "pid": 0, "name": counter.label, "ts": (seconds - start) * 1e6, "args": {counter.name: value}}
        for seconds, value in counter.values
    ]
