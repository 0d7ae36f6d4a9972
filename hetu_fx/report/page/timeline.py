"""A step of each variant: what each device was predicted to do when, beside the time that it has computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from hetu_fx.base.markup import keys, note, number, table
from hetu_fx.planner.simulate.simulation import WORK, Simulation
from hetu_fx.planner.simulate.timeline import COLORS, OTHER, Event
from hetu_fx.report.page.cluster import UNKNOWN
from hetu_fx.report.run import LoggedRun

WIDTH = 1000.0
_MEASURED = "#4a7fd0"
_HEADER = ("device", "predicted compute ms", "measured ms", "ratio", "predicted idle", "measured not computing")


def data(run: LoggedRun) -> dict[str, Any]:
    """Return what was predicted and measured of each variant's step, and of each device."""
    return {name: _variant_data(run, name) for name in run.shown}


def _variant_data(run: LoggedRun, name: str) -> dict[str, Any]:
    computed = dict(enumerate(run.compute_seconds(name)))
    ranks = sorted({*run.plans[name].devices, *computed})
    return {
        "predicted_seconds": _predicted_seconds(run, name),
        "measured_seconds": run.seconds(name),
        "devices": [_device(run, name, rank, computed.get(rank)) for rank in ranks],
    }


def _predicted_seconds(run: LoggedRun, name: str) -> float | None:
    """Return the seconds of the step on paper; where it is not there, those that the log tells."""
    if name in run.on_paper:
        return run.on_paper[name].seconds
    return next((entry["predicted_seconds"] for entry in reversed(run.settled(name))), None)


def _device(run: LoggedRun, name: str, rank: int, measured: float | None) -> dict[str, Any]:
    """Return the seconds that a device was predicted to compute, to idle, and that it has computed; None: unknown."""
    predicted = run.plans[name].predicted
    terms = next((dict(d.seconds) for d in predicted.devices if d.rank == rank), {}) if predicted else {}
    idle = run.on_paper[name].timeline.idle_share(rank) if name in run.on_paper else None
    return {
        "device": rank,
        "predicted_compute_seconds": terms.get("compute"),
        "measured_compute_seconds": measured,
        "predicted_idle_share": idle,
    }


def html(run: LoggedRun) -> str:
    """Return lanes of devices for each variant, a predicted and a measured one, on one scale, and the numbers."""
    if not run.shown:
        return note(UNKNOWN) * bool(run.steps and run.cluster is None)
    events = [event for step in run.on_paper.values() for event in step.timeline.events]
    kinds = dict.fromkeys(event.kind for event in events)
    colours = {kind or "other": COLORS.get(kind, OTHER) for kind in kinds} | {"measured compute": _MEASURED}
    return keys(colours) + "".join(_variant(run, name) for name in run.shown)


def _variant(run: LoggedRun, name: str) -> str:
    step, told = run.on_paper.get(name), _variant_data(run, name)
    predicted, measured = told["predicted_seconds"], told["measured_seconds"]
    whole = max(predicted or 0.0, measured or 0.0) or 1.0
    lanes = [lane for device in told["devices"] for lane in _lanes(step, device, measured, whole)]
    title = f"{name}: predicted {_milliseconds(predicted)}, measured {_milliseconds(measured)}"
    ends = f'<div class="axis"><span>0</span><span>{number(whole, 1e-3)} ms</span></div>'
    pictures = f'<div class="lanes" tabindex="0">{"".join(lanes)}</div><div class="lane"><span></span>{ends}</div>'
    return f"<h3>{escape(title)}</h3>{pictures}{table(_HEADER, [_row(device, measured) for device in told['devices']])}"


def _milliseconds(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{number(seconds, 1e-3)} ms"


def _lanes(step: Simulation | None, device: dict[str, Any], measured: float | None, whole: float) -> Iterator[str]:
    rank, computed = device["device"], device["measured_compute_seconds"]
    if step is not None:
        boxes = [_box(event, step.timeline.start_seconds, whole) for event in drawn(step.timeline.of(rank), whole)]
        yield _lane("", f"device {rank}", "".join(boxes))
    if computed is not None and measured is not None:
        yield _lane(" more", "measured" if step is not None else f"device {rank}", _measured(computed, measured, whole))


def _lane(kind: str, label: str, picture: str) -> str:
    svg = f'<svg viewBox="0 0 {WIDTH:.0f} 20" preserveAspectRatio="none" role="img">{picture}</svg>'
    return f'<div class="lane{kind}"><span>{escape(label)}</span>{svg}</div>'


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
    told = f"{event.name}: {number(event.seconds, 1e-3)} ms from {number(event.start_seconds - start, 1e-3)} ms"
    fill = COLORS.get(event.kind, OTHER)
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="{fill}">'
        f"<title>{escape(told)}</title></rect>"
    )


def _measured(computed: float, step: float, whole: float) -> str:
    told = f"computes {number(computed, 1e-3)} ms of {number(step, 1e-3)} ms"
    return (
        f'<rect width="{step / whole * WIDTH:.1f}" height="20" fill="none" stroke="{_MEASURED}"/>'
        f'<rect width="{computed / whole * WIDTH:.1f}" height="20" fill="{_MEASURED}">'
        f"<title>{escape(told)}</title></rect>"
    )


def _row(device: dict[str, Any], measured: float | None) -> list[str]:
    """Return the cells of a device's row under `_HEADER`."""
    expected, found = device["predicted_compute_seconds"], device["measured_compute_seconds"]
    idle = device["predicted_idle_share"]
    ratio = number(found / expected) if found and expected else ""
    rest = "" if found is None or not measured else f"{max(0.0, 1 - found / measured):.0%}"
    times = number(expected, 1e-3), number(found, 1e-3)
    return [str(device["device"]), *times, ratio, "" if idle is None else f"{idle:.0%}", rest]
