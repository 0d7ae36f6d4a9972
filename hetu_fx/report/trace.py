"""The log of a run as a Chrome trace: each step with its numbers, and what devices did in one step of each variant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetu_fx.report.run import LoggedRun
from hetu_fx.show.timeline import Counter, Event, Timeline

_NUMBERS = ("loss", "rows_per_second", "tokens_per_second", "mfu")
_TOLD = ("variant", "rows", "predicted_seconds", "compute_seconds", "host_seconds", *_NUMBERS)


def timelines(run: LoggedRun) -> list[Timeline]:
    """Return the steps, then for each variant its traced step, measured and predicted, at the time of that step.

    A log that does not say when its entries were told begins each step where the one before ends.
    """
    steps = sorted(_steps(run), key=lambda step: step.start_seconds)
    counters = (_counter(name, steps) for name in _NUMBERS)
    whole = Timeline(tuple(steps), "steps, by the clock of rank 0", tuple(one for one in counters if one.values))
    found = [whole] if steps else []
    for name in run.shown:
        at = run.traced_at.get(name, whole.start_seconds)
        if name in run.traced:
            found.append(_later(run.traced[name], at))
        if name in run.on_paper:
            found.append(replace(_later(run.on_paper[name].timeline, at), name=f"one step of {name}, predicted"))
    return found


def _steps(run: LoggedRun) -> Iterator[Event]:
    """Yield each step from its start to that of the next batch."""
    end = 0.0
    for entry in run.steps:
        end = entry["time"] if "time" in entry else end + entry["seconds"]
        facts = {key: entry[key] for key in _TOLD if _is_known(entry.get(key))}
        yield Event(0, f"step {entry['step']}: {entry['variant']}", end - entry["seconds"], end, "step", facts)


def _is_known(value: object) -> bool:
    """Tell whether a trace can have a value: JSON has no infinity, and no NaN."""
    return math.isfinite(value) if isinstance(value, float) else value not in (None, [])


def _counter(name: str, steps: Sequence[Event]) -> Counter:
    """Return a number over time, of the steps that have it."""
    return Counter(None, name, tuple((one.start_seconds, one.facts[name]) for one in steps if name in one.facts))


def _later(timeline: Timeline, by: float) -> Timeline:
    """Return a timeline so many seconds later."""
    moved = [replace(e, start_seconds=e.start_seconds + by, end_seconds=e.end_seconds + by) for e in timeline.events]
    counters = [replace(c, values=tuple((at + by, value) for at, value in c.values)) for c in timeline.counters]
    return Timeline(tuple(moved), timeline.name, tuple(counters))
