"""A timeline as one HTML page that needs nothing else: boxes per device with names on hover, and its counters below."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape

from hetu_fx.base.documents import write_atomically
from hetu_fx.planner.simulate.timeline import COLORS, OTHER, Counter, Event, Timeline

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
