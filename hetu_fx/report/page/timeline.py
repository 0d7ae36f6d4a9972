"""A step of each variant: what each device was predicted to do when, beside the time that it has computed."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from hetu_fx.base.words import seconds_text
from hetu_fx.planner.simulate.simulation import Simulation
from hetu_fx.report.page.told import UNKNOWN
from hetu_fx.report.run import LoggedRun
from hetu_fx.show.lanes import colours, events_lane
from hetu_fx.show.markup import keys, note, number, table
from hetu_fx.show.timeline import Event, Timeline

_COMPUTE = colours([Event(0, "", 0.0, 0.0, "compute")])
_HEADER = ("device", "predicted compute", "measured", "ratio", "predicted idle", "measured not computing")


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
    """Return the seconds that the log tells, as all of the page does; without, those of the step on paper."""
    told = next((entry["predicted_seconds"] for entry in reversed(run.settled(name))), None)
    return run.on_paper[name].seconds if told is None and name in run.on_paper else told


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
    predicted = [event for step in run.on_paper.values() for event in step.timeline.events]
    measured = [event for step in run.traced.values() for event in step.events]
    return keys({**colours(predicted), **colours(measured), **_COMPUTE}) + "".join(_variant(run, n) for n in run.shown)


def _variant(run: LoggedRun, name: str) -> str:
    told = _variant_data(run, name)
    predicted, measured = told["predicted_seconds"], told["measured_seconds"]
    step, traced = run.on_paper.get(name), run.traced.get(name)
    drawn = [made.seconds for made in (step, traced) if made is not None]
    whole = max(predicted or 0.0, measured or 0.0, *drawn, 0.0) or 1.0
    lanes = [lane for device in told["devices"] for lane in _lanes(step, traced, device, whole)]
    title = f"{name}: predicted {_known(predicted)}, measured {_known(measured)}"
    ends = f'<div class="axis"><span>0</span><span>{seconds_text(whole)}</span></div>'
    pictures = f'<div class="lanes" tabindex="0">{"".join(lanes)}</div><div class="lane"><span></span>{ends}</div>'
    return f"<h3>{escape(title)}</h3>{pictures}{table(_HEADER, [_row(device, measured) for device in told['devices']])}"


def _known(seconds: float | None) -> str:
    return "not known" if seconds is None else seconds_text(seconds)


def _lanes(step: Simulation | None, traced: Timeline | None, device: dict[str, Any], whole: float) -> Iterator[str]:
    """Yield what a device was predicted to do, and what it did: in the step that was traced, or in a median one."""
    rank = device["device"]
    if step is not None:
        yield events_lane(f"device {rank}", step.timeline.of(rank), step.timeline.start_seconds, whole)
    measured = () if traced is None else traced.of(rank)
    label = f"device {rank}" if step is None else "measured"
    if measured:
        yield events_lane(label, measured, 0.0, whole, " more")
    elif device["measured_compute_seconds"] is not None:
        computes = Event(rank, "computes in all", 0.0, device["measured_compute_seconds"], "compute")
        yield events_lane(label, [computes], 0.0, whole, " more")


def _row(device: dict[str, Any], measured: float | None) -> list[str]:
    """Return the cells of a device's row under `_HEADER`."""
    expected, found = device["predicted_compute_seconds"], device["measured_compute_seconds"]
    idle = device["predicted_idle_share"]
    ratio = number(found / expected) if found and expected else ""
    rest = "" if found is None or not measured else f"{max(0.0, 1 - found / measured):.0%}"
    times = ("" if seconds is None else seconds_text(seconds) for seconds in (expected, found))
    return [str(device["device"]), *times, ratio, "" if idle is None else f"{idle:.0%}", rest]
