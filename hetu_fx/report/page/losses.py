"""The loss of each step, as it was returned to process 0."""

from __future__ import annotations

from typing import Any

from hetu_fx.report.run import LoggedRun
from hetu_fx.show.charts import PLACES, Scale, curve, finite, places, plot
from hetu_fx.show.markup import keys, note, number

_COLOUR, _BAND = "#4a7fd0", "#4a7fd040"


def data(run: LoggedRun) -> list[dict[str, Any]]:
    """Return step and loss of every step that has one; null where that is no finite number."""
    known = [entry for entry in run.steps if entry["loss"] is not None]
    shown = {id(entry) for entry in finite(known, lambda entry: entry["loss"])}
    return [{"step": entry["step"], "loss": entry["loss"] if id(entry) in shown else None} for entry in known]


def html(run: LoggedRun) -> str:
    """Return a curve, the first and the last loss, and those of evaluations."""
    known = [entry for entry in data(run) if entry["loss"] is not None]
    if not known:
        return note("The log has no loss: the model returns none, or an older release has written it.") * bool(
            run.steps
        )
    values = [entry["loss"] for entry in known]
    scale = Scale(min(values), max(values))
    picture = curve(places(values), scale, _COLOUR)
    ends = (f"step {known[0]['step']}: {number(values[0])}", f"step {known[-1]['step']}: {number(values[-1])}")
    shown = plot(picture, f"{number(scale.high)}", *ends, f"lowest {number(scale.low)}")
    return _legend(len(values)) + shown + _remarks(run, len(values))


def _legend(steps: int) -> str:
    """Return what the line is, and of many steps the band around it."""
    if steps <= PLACES:
        return keys({}, {"loss": _COLOUR})
    return keys({"least to most of neighbouring steps": _BAND}, {"loss, their median": _COLOUR})


def _remarks(run: LoggedRun, known: int) -> str:
    lost = sum(entry["loss"] is not None for entry in run.steps) - known
    seen = finite(run.evaluations, lambda entry: entry["loss"])
    remarks = [f"{lost} losses are no finite numbers."] * bool(lost)
    if seen:
        last = seen[-1]
        remarks.append(f"Last loss without training: {number(last['loss'])}, after step {last['step']}.")
    return "".join(map(note, remarks))
