"""A timeline as a picture: what devices do, and below it what each holds over time, where that is known.

As an image, or as one HTML page that needs nothing else: a lane per device with names on hover, its counters below.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

from hetu_fx.base.documents import write_atomically
from hetu_fx.base.words import bytes_text, seconds_text
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.plans.schedule import Phase
from hetu_fx.show.charts import LANE, WIDTH, lane
from hetu_fx.show.markup import keys, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hetu_fx.planner.simulate.timeline import Counter, Event, Timeline

WORK = frozenset({"host", *Phase, "optimizer"})
"""Kinds of events in which a device works; other kinds are messages."""

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

_WIDTH, _ROW, _EDGE, _MEMORY = 12.0, 0.35, 1.2, 3.0  # inches
_MILLI, _GIGA = 1e-3, 1e9
_ROOM = 1.2  # above the highest curve; limits further up are not drawn
_LONGEST_TITLE = 110
_FEW_CURVES = 12  # that a legend can name


def draw(
    timeline: Timeline, target: str | BytesIO, limits: Mapping[int, int] | None = None, *, form: str = "png"
) -> None:
    """Write the picture, in the form "png" or "svg"; `limits` are the devices' memory in bytes.

    Raises:
        EnvironmentProblem: without matplotlib.
    """
    heights = [max(2.0, _ROW * len(timeline.devices)), *([_MEMORY] if timeline.memory else [])]
    figure = _new_figure(_WIDTH, sum(heights) + _EDGE * len(heights))
    above, *below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    _draw_events(above, timeline)
    for axes in below:
        _draw_memory(axes, timeline, limits or {})
    figure.axes[-1].set_xlabel("ms")
    figure.savefig(target, format=form, dpi=120)


def _new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches.

    Raises:
        EnvironmentProblem: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure  # no pyplot: its global state and window system are not wanted
    except ImportError as problem:
        raise EnvironmentProblem(
            "a picture needs matplotlib, which is not installed\nhint: pip install 'hetu-fx[ui]'"
        ) from problem
    return Figure(figsize=(width, height), layout="constrained")


def _draw_events(axes: Any, timeline: Timeline) -> None:
    row_of = {device: row for row, device in enumerate(timeline.devices)}
    for kind in dict.fromkeys(event.kind for event in timeline.events):
        own = [event for event in timeline.events if event.kind == kind]
        axes.barh(
            [row_of[event.device] for event in own],
            [event.seconds / _MILLI for event in own],
            left=[(event.start_seconds - timeline.start_seconds) / _MILLI for event in own],
            height=0.8,
            color=COLORS.get(kind, OTHER),
            edgecolor="white",
            linewidth=0.3,
            label=kind or "other",
        )
    axes.set_yticks(list(row_of.values()), [f"device {device}" for device in row_of])
    axes.invert_yaxis()
    name = timeline.name
    axes.set_title(name if len(name) <= _LONGEST_TITLE else f"{name[:_LONGEST_TITLE]}...")
    if timeline.events:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_memory(axes: Any, timeline: Timeline, limits: Mapping[int, int]) -> None:
    curves = timeline.memory
    for device, values in curves.items():
        times = [(seconds - timeline.start_seconds) / _MILLI for seconds, _ in values]
        held = [count / _GIGA for _, count in values]
        label = f"device {device}, at most {bytes_text(max(held) * _GIGA)}"
        axes.step([*times, timeline.seconds / _MILLI], [*held, held[-1]], where="post", label=label, linewidth=1.0)
    top = _ROOM * max((count for values in curves.values() for _, count in values), default=1.0)
    for limit in sorted({limits[device] for device in curves if limits.get(device, top + 1) <= top}):
        axes.axhline(limit / _GIGA, color="#b0b0b0", linestyle="--", linewidth=0.8)
        axes.annotate(f"limit {bytes_text(limit)}", (0.0, limit / _GIGA), fontsize=8, color="#707070")
    axes.set_ylim(0.0, top / _GIGA)
    axes.set_ylabel("memory, GB")
    if len(curves) <= _FEW_CURVES:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


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
    return lane(f"device {device}", "".join(_box(event, start, whole) for event in visible_events(events, whole)))


def visible_events(events: Sequence[Event], whole: float) -> list[Event]:
    """Return the events of a device that can be seen in a picture of `whole` seconds.

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
