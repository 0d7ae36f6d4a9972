"""Memory of each device: what was predicted, by term, beside its limit, and the most that its process has had."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from hetu_fx.base.words import bytes_text
from hetu_fx.planner.values.device_memory import TERMS
from hetu_fx.plans.prediction import DeviceCost
from hetu_fx.report.run import LoggedRun
from hetu_fx.show.markup import COLOURS, bar, cells_table, keys, note

_COLOURS = {term: COLOURS[index % len(COLOURS)] for index, term in enumerate(TERMS)}
_MEASURED = (
    "Measured: the most that torch has had of a GPU; of a CPU the whole process, with Python, libraries and data. "
    "Predicted is what the model takes of it."
)


def data(run: LoggedRun) -> dict[str, Any]:
    """Return the predicted bytes by variant, device and term, with the limit, and the measured peak by process."""
    predicted = {name: [_device(cost) for cost in _costs(run, name)] for name in run.shown}
    return {"predicted": predicted, "peak_bytes": run.peak_bytes}


def _costs(run: LoggedRun, name: str) -> tuple[DeviceCost, ...]:
    predicted = run.plans[name].predicted
    return () if predicted is None else predicted.devices


def _device(cost: DeviceCost) -> dict[str, Any]:
    whole = {"bytes": cost.total_bytes, "limit_bytes": cost.limit_bytes}
    return {"device": cost.rank, **whole, "terms": dict(cost.bytes)}


def html(run: LoggedRun) -> str:
    """Return a table for each variant, or of what was measured alone."""
    tables = [f"<h3>{escape(name)}</h3>{_table(run, name)}" for name in run.shown if _costs(run, name)]
    if not (tables or any(run.peak_bytes)):
        return ""
    if not tables:
        rows = [[f"process {rank}", bytes_text(count)] for rank, count in enumerate(run.peak_bytes)]
        return cells_table(["", "measured peak"], rows) + note(_MEASURED)
    return keys({term: _COLOURS[term] for term in _terms(run)}) + "".join(tables) + note(_MEASURED)


def _terms(run: LoggedRun) -> list[str]:
    """Return the terms that any device has anything of."""
    found = {term for name in run.shown for cost in _costs(run, name) for term, count in cost.bytes if count}
    return [term for term in TERMS if term in found]


def _table(run: LoggedRun, name: str) -> str:
    header = ["device", "needs", "limit", "of it", "measured peak", "predicted", *_terms(run)]
    return cells_table(header, _rows(run, name))


def _rows(run: LoggedRun, name: str) -> Iterator[list[str]]:
    costs, terms = _costs(run, name), _terms(run)
    most = max(cost.total_bytes for cost in costs)
    peaks = dict(enumerate(run.peak_bytes))
    for cost in costs:
        held = dict(cost.bytes)
        drawn = bar([(f"{t}: {bytes_text(held.get(t, 0))}", held.get(t, 0), _COLOURS[t]) for t in terms], most)
        share = f"{cost.total_bytes / cost.limit_bytes:.1%}" if cost.limit_bytes else ""
        limit, peak = (bytes_text(count) if count else "" for count in (cost.limit_bytes, peaks.get(cost.rank)))
        parts = (bytes_text(held.get(term, 0)) for term in terms)
        yield [str(cost.rank), bytes_text(cost.total_bytes), limit, share, peak, drawn, *parts]
