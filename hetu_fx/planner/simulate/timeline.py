"""Timelines: what each device did, or will do, and when.

Measured steps and simulated ones are the same type, so they can be laid side by side. A timeline becomes a
Chrome trace (chrome://tracing, Perfetto), a picture, or an HTML page that needs nothing else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from io import BytesIO
from typing import Any

from hetu_fx.base.documents import write_atomically
from hetu_fx.errors import EnvironmentProblem, StateError

COLORS = {
    "forward": "#4c9be8",
    "backward": "#2f6f4f",
    "input gradient": "#2f6f4f",
    "weight gradient": "#7fb069",
    "send": "#e8b84c",
    "gather": "#c77dba",
    "gradients": "#d1605e",
    "optimizer": "#7d7d7d",
    "host": "#a8a29e",
    "communication": "#f2d9a0",
    "group creation": "#8c6d46",
}
"""Colours of the picture by an event's kind; other kinds are drawn in `OTHER`."""

OTHER = "#b0b0b0"


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
                f"starts at {self.start_seconds} s; take both times from one clock"
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

    @classmethod
    def merged(cls, timelines: Iterable[Timeline], name: str = "hetu_fx") -> Timeline:
        """Return the events of several timelines (of one clock) as one."""
        timelines = tuple(timelines)
        events = tuple(event for timeline in timelines for event in timeline.events)
        return cls(events, name, tuple(counter for timeline in timelines for counter in timeline.counters))

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
        """Draw the timeline, a row per device. Raises `EnvironmentProblem` without matplotlib."""
        _draw(self, os.fspath(path))

    def _repr_png_(self) -> bytes | None:
        """Return the picture for notebooks, which show the text where there is none."""
        drawn = BytesIO()
        try:
            _draw(self, drawn)
        except EnvironmentProblem:
            return None
        return drawn.getvalue()

    def __str__(self) -> str:
        rows = [f"device {d}: busy {self.busy_seconds(d) * 1e3:.3g} ms" for d in self.devices]
        return "\n".join((f"{self.name}: {self.seconds * 1e3:.3g} ms", *rows))


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


def _draw(timeline: Timeline, target: str | BytesIO) -> None:
    try:
        from matplotlib.figure import Figure  # no pyplot: its global state and window system are not wanted
    except ImportError as problem:
        raise EnvironmentProblem(
            f"cannot draw {target}: matplotlib is not installed; pip install 'hetu-fx[ui]', "
            f"or write a Chrome trace with write_chrome"
        ) from problem
    devices = timeline.devices
    figure = Figure(figsize=(12, 1.2 + 0.5 * len(devices)), layout="constrained")
    axes = figure.add_subplot()
    start = timeline.start_seconds
    for event in timeline.events:
        left, color = (event.start_seconds - start) * 1e3, COLORS.get(event.kind, OTHER)
        axes.barh(event.device, event.seconds * 1e3, left=left, height=0.8, color=color, edgecolor="white")
    axes.set_yticks(devices, [f"device {device}" for device in devices])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(timeline.name)
    _add_legend(axes, {event.kind: COLORS.get(event.kind, OTHER) for event in timeline.events})
    figure.savefig(target, format="png", dpi=120)


def _add_legend(axes: Any, colors: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    order = [kind for kind in COLORS if kind in colors] + sorted(set(colors) - set(COLORS))
    handles = [Patch(color=colors[kind], label=kind or "other") for kind in order]
    if handles:
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


_WIDTH, _LEFT = 1200.0, 90.0
_ROW, _CURVE, _GAP = 22.0, 40.0, 6.0
_STYLE = (
    "body{font:13px sans-serif;margin:1em}svg text{font:11px sans-serif}.key{margin-right:1em}rect:hover{opacity:.7}"
)


def write_html(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the page, atomically."""
    write_atomically(path, html(timeline))


def html(timeline: Timeline) -> str:
    """Return the page."""
    name = escape(timeline.name)
    keys = "".join(map(_key, dict.fromkeys(event.kind for event in timeline.events)))
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1><p>{timeline.seconds * 1e3:.4g} ms</p><p>{keys}</p>"
        f"{_picture(timeline)}</body></html>\n"
    )


def _key(kind: str) -> str:
    color = COLORS.get(kind, OTHER)
    return f'<span class="key"><span style="color:{color}">&#9632;</span> {escape(kind or "other")}</span>'


def _picture(timeline: Timeline) -> str:
    scale = (_WIDTH - _LEFT) / (timeline.seconds or 1.0)
    top, parts = _GAP, list[str]()
    for device in timeline.devices:
        parts.append(f'<text x="0" y="{top + _ROW * 0.7:.1f}">device {device}</text>')
        parts += [_box(event, timeline.start_seconds, scale, top) for event in timeline.of(device)]
        top += _ROW + _GAP
        for counter in timeline.counters:
            if counter.device == device:
                parts += _curve(counter, timeline, scale, top)
                top += _CURVE + _GAP
    for counter in timeline.counters:
        if counter.device is None:
            parts += _curve(counter, timeline, scale, top)
            top += _CURVE + _GAP
    return f'<svg width="{_WIDTH:.0f}" height="{top:.0f}">{"".join(parts)}</svg>'


def _box(event: Event, start: float, scale: float, top: float) -> str:
    left, width = _LEFT + (event.start_seconds - start) * scale, max(0.5, event.seconds * scale)
    label = f"{event.name}: {event.seconds * 1e3:.4g} ms from {(event.start_seconds - start) * 1e3:.4g} ms"
    return (
        f'<rect x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{_ROW}" '
        f'fill="{COLORS.get(event.kind, OTHER)}"><title>{escape(label)}</title></rect>'
    )


def _curve(counter: Counter, timeline: Timeline, scale: float, top: float) -> Iterator[str]:
    """Draw a counter as steps, from zero to its most."""
    most = max((value for _, value in counter.values), default=0.0)
    end = timeline.start_seconds + timeline.seconds
    points = []
    for (seconds, value), (until, _) in zip(counter.values, (*counter.values[1:], (end, 0.0)), strict=True):
        height = top + _CURVE * (1 - value / most if most else 1.0)
        points += [_point(at, timeline.start_seconds, scale, height) for at in (seconds, until)]
    label = f"{counter.label}, at most {most:.4g}"
    yield f'<text x="0" y="{top + _CURVE * 0.5:.1f}">{escape(counter.name)}</text>'
    yield (
        f'<polyline fill="none" stroke="#555" points="{" ".join(points)}"><title>{escape(label)}</title></polyline>'
        f'<text x="{_LEFT:.0f}" y="{top + 10:.1f}">{most:.4g}</text>'
    )


def _point(seconds: float, start: float, scale: float, height: float) -> str:
    return f"{_LEFT + (seconds - start) * scale:.2f},{height:.2f}"
