"""How long steps took, by variant and one by one, beside what was predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from hetu_fx.report.run import LoggedRun
from hetu_fx.report.summary import HEADER, summaries, variant_row
from hetu_fx.report.updates import Entry
from hetu_fx.show.charts import Scale, assign_colours, boxes, levels, places, plot, shares
from hetu_fx.show.markup import keys, note, number, table

HIGHEST = 2.0
"""A picture is this many times the median high at most, so that steps that make graphs leave room to the others."""


def variants(run: LoggedRun) -> list[dict[str, Any]]:
    """Return what each variant took."""
    return [asdict(summary) for summary in summaries(run.log)]


def variants_html(run: LoggedRun) -> str:
    """Return the same as a table."""
    found = summaries(run.log)
    return table(HEADER, map(variant_row, found)) if found else ""


def data(run: LoggedRun) -> list[dict[str, Any]]:
    """Return variant, seconds, predicted seconds and rows of every step."""
    names = ("step", "variant", "seconds", "predicted_seconds", "rows", "longest")
    return [{name: entry.get(name) for name in names} for entry in run.steps]


def html(run: LoggedRun) -> str:
    """Return a box for each step, or for each few where there are many."""
    if not run.steps:
        return ""
    colours = assign_colours([entry["variant"] for entry in run.steps])
    seconds = [entry["seconds"] for entry in run.steps]
    scale = Scale(0.0, min(max(seconds), HIGHEST * median(seconds)) or 1.0)
    groups = places(run.steps)
    picture = boxes([_box(group, colours) for group in groups], scale) + levels(list(map(_predicted, groups)), scale)
    ends = f"step {run.steps[0]['step']}", f"step {run.steps[-1]['step']}"
    beyond = sum(value > scale.high for value in seconds)
    lines = {"predicted": "currentColor"} if any(entry["predicted_seconds"] for entry in run.steps) else {}
    remarks = [f"Higher than the picture: {beyond} steps, the longest of {number(max(seconds))} s."] * bool(beyond)
    return keys(colours, lines) + plot(picture, f"{number(scale.high)} s", *ends) + "".join(map(note, remarks))


def _box(group: Sequence[Entry], colours: Mapping[str, str]) -> tuple[float, str, str]:
    """Return the median seconds of neighbours, the colour of most of them, and what is said of them."""
    counts = Counter(entry["variant"] for entry in group)
    middle = median(entry["seconds"] for entry in group)
    first, last = group[0]["step"], group[-1]["step"]
    where = f"step {first}" if len(group) == 1 else f"steps {first} to {last}, median"
    return middle, colours[counts.most_common(1)[0][0]], f"{where}: {number(middle)} s, {shares(counts)}"


def _predicted(group: Sequence[Entry]) -> float | None:
    known = [entry["predicted_seconds"] for entry in group if entry["predicted_seconds"] is not None]
    return median(known) if known else None
