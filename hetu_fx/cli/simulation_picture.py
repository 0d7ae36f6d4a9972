"""A simulated step as a picture: what devices do, and below it what each holds over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetu_fx.base.words import bytes_text
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.planner.simulate.timeline import COLORS, OTHER, Timeline

_WIDTH, _ROW, _EDGE = 12.0, 0.35, 1.2
_GIGABYTE = 1e9
_ROOM = 1.2  # above the highest curve; limits further up are not drawn
_LONGEST_TITLE = 110
_FEW_CURVES = 12  # that a legend can name


def draw(timeline: Timeline, limits: Mapping[int, int], path: Path) -> None:
    """Write the picture, a PNG or an SVG by the path's ending; `limits` are the devices' memory.

    Raises `EnvironmentProblem` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure  # no pyplot: its global state and window system are not wanted
    except ImportError as problem:
        raise EnvironmentProblem(
            f"cannot draw {path}: matplotlib is not installed; pip install 'hetu-fx[ui]', or write --picture x.html"
        ) from problem
    rows = len(timeline.devices)
    figure = Figure(figsize=(_WIDTH, 2 * _EDGE + _ROW * rows + 3.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[max(2.0, _ROW * rows), 3.0])
    _draw_events(above, timeline)
    _draw_memory(below, timeline, limits)
    figure.savefig(path, format=path.suffix.removeprefix("."), dpi=120)


def _draw_events(axes: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    row_of = {device: row for row, device in enumerate(timeline.devices)}
    start = timeline.start_seconds
    for kind in dict.fromkeys(event.kind for event in timeline.events):
        own = [event for event in timeline.events if event.kind == kind]
        axes.barh(
            [row_of[event.device] for event in own],
            [event.seconds for event in own],
            left=[event.start_seconds - start for event in own],
            height=0.8,
            color=COLORS.get(kind, OTHER),
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_yticks(list(row_of.values()), [f"device {device}" for device in row_of])
    axes.invert_yaxis()
    name = timeline.name
    axes.set_title(name if len(name) <= _LONGEST_TITLE else f"{name[:_LONGEST_TITLE]}...")
    kinds = dict.fromkeys(event.kind for event in timeline.events)
    keys = [Patch(color=COLORS.get(kind, OTHER), label=kind or "other") for kind in kinds]
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_memory(axes: Any, timeline: Timeline, limits: Mapping[int, int]) -> None:
    end = timeline.start_seconds + timeline.seconds
    curves = timeline.memory
    for device, values in curves.items():
        times = [seconds - timeline.start_seconds for seconds, _ in values]
        held = [count / _GIGABYTE for _, count in values]
        label = f"device {device}, at most {bytes_text(max(held) * _GIGABYTE)}"
        axes.step([*times, end - timeline.start_seconds], [*held, held[-1]], where="post", label=label, linewidth=1.0)
    top = _ROOM * max((count for values in curves.values() for _, count in values), default=1.0)
    for limit in sorted({limits[device] for device in curves}):
        if limit <= top:
            axes.axhline(limit / _GIGABYTE, color="#b0b0b0", linestyle="--", linewidth=0.8)
            axes.annotate(f"limit {bytes_text(limit)}", (0.0, limit / _GIGABYTE), fontsize=8, color="#707070")
    axes.set_ylim(0.0, top / _GIGABYTE)
    axes.set_ylabel("memory, GB")
    axes.set_xlabel("seconds")
    if len(curves) <= _FEW_CURVES:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
