"""What the log of a run says: each entry in words, and what variants took beside what was predicted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hetu_fx.base.words import bytes_text, seconds_text, share_text
from hetu_fx.report.updates import Entry
from hetu_fx.show.markup import number
from hetu_fx.show.table import table_text

CHANGES = ("plan", "cluster", "health", "switch", "built", "evicted", "moved", "arrived", "lost")
HEADER = (
    "variant",
    "steps",
    "first",
    "median",
    "after a switch",
    "host",
    "predicted",
    "measured / predicted",
)


def entry_text(entry: Entry) -> str:
    """Return an entry as one line."""
    match entry["event"]:
        case "start":
            return f"{entry['processes']} processes, variants {', '.join(entry['variants'])}"
        case "plan":
            return f"step {entry['step']}: a new plan, {entry['name']!r}"
        case "cluster":
            return f"step {entry['step']}: the first steps have corrected the devices' speeds"
        case "memory":
            told = ", ".join(map(bytes_text, entry["peak_bytes"]))
            return f"step {entry['step']}: processes have had up to {told}"
        case "health":
            return f"step {entry['step']}: {rates_text(entry['rates'])}"
        case "gathered":
            size, names = sum(op["bytes"] for op in entry["ops"]), dict.fromkeys(op["op"] for op in entry["ops"])
            told = f"{bytes_text(size)} for {', '.join(names)}" if names else "nothing any more"
            return f"step {entry['step']}: {entry['variant']!r} gathers {told}"
        case "switch":
            return f"step {entry['step']}: {entry['from']!r} -> {entry['to']!r}"
        case "built":
            return f"step {entry['step']}: graphs of {entry['variant']!r} made in {seconds_text(entry['seconds'])}"
        case "evicted":
            return f"step {entry['step']}: graphs of {entry['variant']!r} evicted, {bytes_text(entry['bytes'])}"
        case "moved":
            size, why = bytes_text(entry["bytes"]), f": {entry['why']}" if "why" in entry else ""
            return f"step {entry['step']}: homes changed, {size} in {seconds_text(entry['seconds'])}{why}"
        case "arrived":
            took = f"{bytes_text(entry['bytes'])} in {seconds_text(entry['seconds'])}"
            waited = f"of which {seconds_text(entry['waited_seconds'])} were waited for"
            return f"step {entry['step']}: optimizer state is home, {took}, {waited}"
        case "evaluation":
            return f"evaluation  {entry['variant']}  {seconds_text(entry['seconds'])}{_loss(entry)}"
        case "trace":
            return f"step {entry['step']}: what rank {entry['rank']} did in it, {len(entry['spans'])} spans"
        case "lost":
            return f"step {entry['step']}: a rank is lost: {entry['why']}"
        case _:
            predicted = entry["predicted_seconds"]
            beside = "" if predicted is None else f" ({seconds_text(predicted)} predicted)"
            took = f"{seconds_text(entry['seconds'])}{beside}{_rates(entry)}"
            return f"step {entry['step']}  {entry['variant']}  {took}{_loss(entry)}"


def _rates(entry: Entry) -> str:
    """Return how much a step has got done, as far as that is known: tokens in place of rows."""
    name = "tokens" if "tokens_per_second" in entry else "rows"
    rate = entry.get(f"{name}_per_second")
    mfu = f"  MFU {share_text(entry['mfu'])}" if "mfu" in entry else ""
    return ("" if rate is None else f"  {number(rate)} {name}/s") + mfu


def _loss(entry: Entry) -> str:
    return "" if entry["loss"] is None else f"  loss {entry['loss']:.4g}"


def rates_text(rates: Mapping[Any, float]) -> str:
    """Say which devices are slow, and how slow; `rates` are those that are not 1."""
    slow = [f"device {device} takes {rate:.2g} times as long" for device, rate in rates.items()]
    return ", ".join(slow) if slow else "all devices are as they were measured"


@dataclass(frozen=True, slots=True)
class VariantSummary:
    """What a log says of a variant.

    Attributes:
        name: the variant's.
        steps: of training.
        first_seconds: of its first step, which makes its graphs, and is in no median.
        seconds: of the others that came after a step of the same variant; None where there are none.
        switched_seconds: of the others that came after one of another variant; None where there are none.
        host_seconds: of the process whose host took longest, besides the model's own ops; None where nobody has told.
        predicted_seconds: as the last step tells it; None where nobody has.
    """

    name: str
    steps: int
    first_seconds: float
    seconds: float | None
    switched_seconds: float | None
    host_seconds: float | None
    predicted_seconds: float | None


def summaries(log: Sequence[Entry]) -> tuple[VariantSummary, ...]:
    """Return what each variant took, in the order in which they first ran."""
    by_variant: dict[str, list[tuple[Entry, bool]]] = {}
    for before, entry in itertools.pairwise(log):
        if entry["event"] == "step":  # a log begins with its start, and tells of a switch right before the step
            by_variant.setdefault(entry["variant"], []).append((entry, before["event"] == "switch"))
    return tuple(_summary(name, entries) for name, entries in by_variant.items())


def training_steps(log: Sequence[Entry]) -> list[Entry]:
    """Return the training steps of a log."""
    return [entry for entry in log if entry["event"] == "step"]


def _summary(name: str, entries: Sequence[tuple[Entry, bool]]) -> VariantSummary:
    seconds = [(entry["seconds"], switched) for entry, switched in entries]
    stayed, switched = ([s for s, changed in seconds[1:] if changed is kind] for kind in (False, True))
    host = [max(entry["host_seconds"]) for entry, _ in entries[1:] if entry.get("host_seconds")]  # older logs lack it
    own, after_switches, hosts = (median(found) if found else None for found in (stayed, switched, host))
    predicted = entries[-1][0]["predicted_seconds"]
    return VariantSummary(name, len(entries), seconds[0][0], own, after_switches, hosts, predicted)


def summary_text(log: Sequence[Entry]) -> str:
    """Return a table of the variants, and the changes, a line each."""
    table = table_text(HEADER, [variant_row(summary) for summary in summaries(log)])
    changes = [entry_text(entry) for entry in log if entry["event"] in CHANGES]
    return "\n".join([table, *changes])


def variant_row(summary: VariantSummary) -> list[str]:
    """Return the cells of a variant's row under `HEADER`."""
    measured = summary.seconds or summary.switched_seconds
    ratio = measured / summary.predicted_seconds if measured and summary.predicted_seconds else None
    measured_seconds = summary.first_seconds, summary.seconds, summary.switched_seconds, summary.host_seconds
    times = (*measured_seconds, summary.predicted_seconds)
    cells = ("" if seconds is None else seconds_text(seconds) for seconds in times)
    return [summary.name, str(summary.steps), *cells, "" if ratio is None else f"{ratio:.3g}"]


def to_json(log: Sequence[Entry]) -> dict[str, Any]:
    """Return the summary as what JSON can say."""
    rows = [{name: getattr(summary, name) for name in VariantSummary.__slots__} for summary in summaries(log)]
    return {"variants": rows, "changes": [entry for entry in log if entry["event"] in CHANGES]}
