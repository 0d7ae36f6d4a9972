"""Where a step's seconds go, predicted beside measured, by device: terms that add up to the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from examples.demo.record import RunRecord, StepRecord
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.prediction import DeviceCost
from hetu_fx.show.table import table_text
from hetu_fx.show.timeline import Event

WINDOWS = ("forward", "backward", "optimizer")
PREDICTED: Mapping[str, tuple[str, ...]] = {
    "work": ("compute",),
    "messages and waiting": ("tensor_parallel", "hand_over", "idle", "gradient_sync", "gather"),
    "update": ("optimizer",),
    "besides": ("host",),
}
"""What is told apart in a run, and the terms of a prediction that it has."""


@dataclass(frozen=True, slots=True)
class StepTerms:
    """Seconds of one device, by the names of `PREDICTED`; together they are the step."""

    seconds: Mapping[str, float]

    @classmethod
    def predicted(cls, device: DeviceCost) -> StepTerms:
        """Return those of a prediction."""
        found = dict(device.seconds)
        return cls({name: sum(found.get(term, 0.0) for term in terms) for name, terms in PREDICTED.items()})

    @classmethod
    def measured(cls, events: Sequence[Event], step: float) -> StepTerms:
        """Return those of a device in a step of so many seconds, from its windows and the messages in them."""
        windows = {event.kind: (event.start_seconds, event.end_seconds) for event in events if event.kind in WINDOWS}
        messages = [(event.start_seconds, event.end_seconds) for event in events if event.kind == "communication"]
        talked = {kind: covered(messages, *window) for kind, window in windows.items()}
        lasted = {kind: end - start for kind, (start, end) in windows.items()}
        waiting = sum(talked.values())
        update = lasted.get("optimizer", 0.0) - talked.get("optimizer", 0.0)
        work = sum(lasted.values()) - waiting - update
        values = work, waiting, update, step - sum(lasted.values())
        return cls(dict(zip(PREDICTED, values, strict=True)))

    @property
    def step(self) -> float:
        """Return the seconds of the step."""
        return sum(self.seconds.values())


def covered(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Return the seconds from `start` to `end` that lie in any of some intervals."""
    total, reached = 0.0, start
    for first, last in sorted(intervals):
        first, last = max(first, reached), min(last, end)
        if last > first:
            total, reached = total + last - first, last
    return total


def terms_text(run: RunRecord, steps: Sequence[StepRecord]) -> str:
    """Return a table of the terms of each device, of a median step of one variant; empty where none was predicted."""
    if not steps:
        return ""
    chosen = sorted(steps, key=lambda record: record.seconds)[len(steps) // 2]
    predicted = Plan.from_json(run.plans[chosen.variant]).predicted
    if predicted is None:
        return ""
    rows = [row for device in predicted.devices for row in _rows(run, chosen, device)]
    middle = median(record.seconds for record in steps)
    title = f"seconds of step {chosen.step + 1} on plan {chosen.variant!r} (the median of {len(steps)}: {middle:.2f} s)"
    return table_text(["device", title, "predicted", "measured", "more"], rows)


def _rows(run: RunRecord, record: StepRecord, device: DeviceCost) -> list[list[str]]:
    prefix = f"step {record.step + 1}: "
    events = [e for e in run.measured.events if e.device == device.rank and e.name.startswith(prefix)]
    said, taken = StepTerms.predicted(device), StepTerms.measured(events, record.seconds)
    pairs = {name: (said.seconds[name], taken.seconds[name]) for name in PREDICTED} | {"step": (said.step, taken.step)}
    return [
        [str(device.rank) if name == "work" else "", name, f"{one:.3f}", f"{other:.3f}", f"{other - one:+.3f}"]
        for name, (one, other) in pairs.items()
    ]
