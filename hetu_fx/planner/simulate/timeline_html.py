"""A timeline as one HTML page that needs nothing else: a lane per device with names on hover, its counters below."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from hetu_fx.base.documents import write_atomically
from hetu_fx.base.words import seconds_text
from hetu_fx.planner.simulate.picture import COLORS, OTHER
from hetu_fx.planner.simulate.simulation import WORK
from hetu_fx.planner.simulate.timeline import Counter, Event, Timeline
from hetu_fx.show.charts import LANE, WIDTH, lane
from hetu_fx.show.markup import keys, page


def write_html(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the page, atomically."""
    write_atomically(path, html(timeline))


def html(timeline: Timeline) -> str:
    """Return the page."""
    rows = "".join(row for device in (*timeline.devices, None) for row in _rows(timeline, device))
    told = f"<p>{seconds_text(timeline.seconds)}</p>"
    return page(timeline.name, f'{told}{keys(colours(timeline.events))}<div class="lanes">{rows}</div>')


def colours(events: Iterable[Event]) -> dict[str, str]:
    """Return the colours of the kinds that events have, by name."""
    return {event.kind or "other": COLORS.get(event.kind, OTHER) for event in events}


def _rows(timeline: Timeline, device: int | None) -> Iterator[str]:
    """Yield what a device does, and its counters; with None those of no device."""
    start, whole = timeline.start_seconds, timeline.seconds or 1.0
    if device is not None:
        yield device_lane(device, timeline.of(device), start, whole)
    for counter in timeline.counters:
        if counter.device == device:
            yield _curve(counter, start, whole)


def device_lane(device: int, events: Sequence[Event], start: float, whole: float) -> str:
    """Return the events of a device in a picture of `whole` seconds from `start` on."""
    return lane(f"device {device}", "".join(_box(event, start, whole) for event in drawn(events, whole)))


def drawn(events: Sequence[Event], whole: float) -> list[Event]:
    """Return the events of a device that can be seen in a picture of `whole` seconds.

    What is narrower than a dot, and begins in one that is taken by another of its row, is left out.
    """
    dot, taken, found = whole / WIDTH, dict[bool, float](), list[Event]()
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
