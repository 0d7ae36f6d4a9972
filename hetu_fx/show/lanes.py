"""A timeline as lanes: what each device does, with names on hover, and below it its numbers over time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from hetu_fx.base.documents import write_atomically
from hetu_fx.base.words import seconds_text
from hetu_fx.show.charts import LANE, WIDTH, lane
from hetu_fx.show.markup import keys, page

if TYPE_CHECKING:
    from hetu_fx.show.timeline import Counter, Event, Timeline

COLORS = {
    "forward": "#4c9be8",
    "backward": "#2f6f4f",
    "input gradient": "#2f6f4f",
    "weight gradient": "#7fb069",
    "compute": "#4a7fd0",
    "send": "#e8b84c",
    "gather": "#c77dba",
    "gradients": "#d1605e",
    "optimizer": "#7d7d7d",
    "host": "#a8a29e",
    "communication": "#f2d9a0",
    "group creation": "#8c6d46",
}
"""Colours by an event's kind; other kinds are drawn in `OTHER`."""

OTHER = "#b0b0b0"

WORK = frozenset(COLORS) - {"send", "gather", "gradients", "communication", "group creation"}
"""Kinds of events in which a device works; other kinds are messages."""


def write_html(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the lanes as a page that needs nothing else, atomically."""
    write_atomically(path, page(timeline.name, lanes_html(timeline)))


def lanes_html(timeline: Timeline) -> str:
    """Return the lanes with what their colours mean."""
    rows = "".join(row for device in (*timeline.devices, None) for row in _rows(timeline, device))
    told = f"<p>{seconds_text(timeline.seconds)}</p>"
    return f'{told}{keys(colours(timeline.events))}<div class="lanes">{rows}</div>'


def colours(events: Iterable[Event]) -> dict[str, str]:
    """Return the colours of the kinds that events have, by name."""
    return {event.kind or "other": COLORS.get(event.kind, OTHER) for event in events}


def _rows(timeline: Timeline, device: int | None) -> Iterator[str]:
    """Yield what a device does, and its counters; with None those of no device."""
    start, whole = timeline.start_seconds, timeline.seconds or 1.0
    if device is not None:
        yield events_lane(f"device {device}", timeline.of(device), start, whole)
    for counter in timeline.counters:
        if counter.device == device:
            yield _curve(counter, start, whole)


def events_lane(label: str, events: Sequence[Event], start: float, whole: float, kind: str = "") -> str:
    """Return the events of a device in a lane of `whole` seconds from `start` on."""
    return lane(label, "".join(_box(event, start, whole) for event in visible_events(events, whole)), kind)


def visible_events(events: Sequence[Event], whole: float) -> list[Event]:
    """Return the events of a device that can be seen in a lane of `whole` seconds.

    What is narrower than a dot, and begins in one that is taken by another of its row, is left out.
    """
    dot, taken = whole / WIDTH, dict[bool, float]()
    found: list[Event] = []
    for event in events:
        is_work = event.kind in WORK
        if event.seconds >= dot or event.start_seconds >= taken.get(is_work, -1.0):
            found.append(event)
            taken[is_work] = event.start_seconds + max(event.seconds, dot)
    return found


def _box(event: Event, start: float, whole: float) -> str:
    """Return a box: work in the upper part of a lane, messages below it, as both go on at once."""
    left, width = (event.start_seconds - start) / whole * WIDTH, max(1.0, event.seconds / whole * WIDTH)
    top, height = (0, 13) if event.kind in WORK else (14, 6)
    told = f"{event.name}: {seconds_text(event.seconds)} from {seconds_text(event.start_seconds - start)}"
    fill = COLORS.get(event.kind, OTHER)
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="{fill}">'
        f"<title>{escape(told)}</title></rect>"
    )


def _curve(counter: Counter, start: float, whole: float) -> str:
    """Draw a counter as steps, from zero to its most."""
    most = max((value for _, value in counter.values), default=0.0)
    starts = [(seconds - start) / whole * WIDTH for seconds, _ in counter.values]
    points = []
    for (_, value), left, right in zip(counter.values, starts, (*starts[1:], WIDTH), strict=False):
        height = LANE * (1 - value / most if most else 1.0)
        points += [f"{left:.1f},{height:.1f}", f"{right:.1f},{height:.1f}"]
    told = f"<title>{escape(counter.label)}, at most {most:.4g}</title>"
    line = f'<polyline fill="none" stroke="currentColor" points="{" ".join(points)}">{told}</polyline>'
    return lane(f"{counter.name}, {most:.3g}", line)
