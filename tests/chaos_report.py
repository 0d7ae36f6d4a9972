"""What came of faults: times, steps lost, and the part of the time that was spent on steps (ETTR)."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from tests.chaos_kinds import KINDS, LOSSES, NEEDS_NETWORK, Fault
from tests.chaos_record import ChaosError, Record, Span

MTBF_SECONDS = (15, 60)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came of a fault, in seconds after it; None where there is no such thing, or the next fault came before.

    Attributes:
        detect: until the launcher knew of all that were lost.
        regroup: until the others, and those that took a lost one's place, began anew.
        resume: until they had finished a step.
        pause: the longest time without a finished step, where no process was lost.
        source: what they went on from: "memory", "checkpoint" or "start".
        steps_lost: finished steps that had to be done again.
        world: processes after it.
    """

    kind: str
    phase: str
    world: int
    detect: float | None = None
    regroup: float | None = None
    resume: float | None = None
    pause: float | None = None
    source: str | None = None
    steps_lost: int = 0


def recovery_of(fault: Fault, record: Record, until: float) -> Recovery:
    """Read what came of a fault from what launcher and script have written; the next fault came at `until`."""
    if fault.kind not in LOSSES:
        world = len([start for start in record.starts() if start["seconds"] <= fault.over][-1]["workers"])
        return Recovery(fault.kind, fault.phase, world, pause=pause_of(fault, record, until))
    lost = max(event["seconds"] for event in record.lost(fault.victims))
    start = next(event for event in record.starts() if event["seconds"] > lost)
    first = next((line["seconds"] for line in record.steps(start["seconds"]) if line["seconds"] < until), None)
    resumed = resumed_at(start, record)
    return Recovery(
        kind=fault.kind,
        phase=fault.phase,
        detect=lost - fault.done,
        regroup=start["seconds"] - fault.done,
        resume=None if first is None else first - fault.done,
        source=resumed["source"] if resumed else None,
        steps_lost=steps_lost_at(start, record),
        world=len(start["workers"]),
    )


def pause_of(fault: Fault, record: Record, until: float) -> float:
    """Return the longest time without a finished step, of those that a fault was in; the next one came at `until`."""
    steps = [line["seconds"] for line in record.steps() if line["seconds"] < until]
    before = max((at for at in steps if at <= fault.done), default=fault.done)
    after = min((at for at in steps if at >= fault.over), default=fault.over)
    return max(b - a for a, b in pairwise([before, *(at for at in steps if before < at < after), after]))


def resumed_at(start: dict[str, Any], record: Record) -> dict[str, Any] | None:
    """Return what the script has told of where it goes on at a start; None if it was lost before."""
    next_start = min((s["seconds"] for s in record.starts() if s["number"] > start["number"]), default=float("inf"))
    told = [line for line in record.told("resumed", start["seconds"]) if line["seconds"] < next_start]
    return told[0] if told else None


def steps_lost_at(start: dict[str, Any], record: Record) -> int:
    """Return how many finished steps are done again after a start, as far as the script has told where it goes on."""
    before = [line for line in record.progress() if line["seconds"] < start["seconds"]]
    resumed = resumed_at(start, record)
    return max(0, _finished(before) - resumed["resumed"]) if resumed else 0


def _finished(told: Sequence[dict[str, Any]]) -> int:
    """Return the number of steps that were done at the end of what is told."""
    for line in reversed(told):
        for what in ("finished", "resumed", "rolled_back"):
            if what in line:
                return int(line[what])
    return 0


def check_joins(record: Record) -> None:
    """Raise ChaosError if a process that joins has cost a step."""
    for start in starts_by_joins(record):
        if lost := steps_lost_at(start, record):
            raise ChaosError(f"a process that joins at start {start['number']} costs {lost} steps")


def starts_by_joins(record: Record) -> list[dict[str, Any]]:
    """Return the starts that follow no loss."""
    lost = [event["seconds"] for event in record.lost()]
    pairs = pairwise(record.starts())
    return [b for a, b in pairs if not any(a["seconds"] < at < b["seconds"] for at in lost)]


def joins_of(record: Record) -> list[float]:
    """Return for each join the seconds without a step, those with a bad network left out."""
    made = []
    for start in starts_by_joins(record):
        last = [line["seconds"] for line in record.steps() if line["seconds"] < start["seconds"]]
        next_ = record.steps(start["seconds"])
        if last and next_ and not any(span.meets(last[-1], next_[0]["seconds"]) for span in record.bad_network):
            made.append(next_[0]["seconds"] - last[-1])
    return made


def summary(faults: Sequence[Fault], record: Record) -> dict[str, Any]:
    """Sum up by kind of fault: p50 and p95 in seconds, and steps lost; then joins, and the part of useful time."""
    ends = [*(fault.done for fault in faults), float("inf")][1:]
    rows = [recovery_of(fault, record, until) for fault, until in zip(faults, ends, strict=True)]
    made: dict[str, Any] = {"rows": [asdict(row) for row in rows], "kinds": {}}
    for kind in (kind for kind in KINDS if any(row.kind == kind for row in rows)):
        chosen = [row for row in rows if row.kind == kind]
        made["kinds"][kind] = {
            "faults": len(chosen),
            "phases": Counter(row.phase for row in chosen),
            "sources": Counter(row.source for row in chosen if row.source),
            "steps_lost": sum(row.steps_lost for row in chosen),
            **{f"{name}_seconds": spread([getattr(row, name) for row in chosen]) for name in _TIMES},
        }
    joins = joins_of(record)
    return {**made, "join_seconds": spread(joins), **steps_of(faults, record), **useful(rows, joins, record)}


_TIMES = ("detect", "regroup", "resume", "pause")


def steps_of(faults: Sequence[Fault], record: Record) -> dict[str, Any]:
    """Return what a step takes: one without a start or a fault between it and that before; one with a bad network."""
    starts = [start["seconds"] for start in record.starts()]
    times = [Span(fault.done, fault.over) for fault in faults]
    calm, bad = list[float](), list[float]()
    for a, b in pairwise(line["seconds"] for line in record.steps()):
        if bisect_right(starts, a) != bisect_right(starts, b):
            continue
        if any(span.meets(a, b) for span in record.bad_network):
            bad.append(b - a)
        elif not any(time.meets(a, b) for time in times):
            calm.append(b - a)
    return {"step_seconds": spread(calm), "bad_network_step_seconds": spread(bad)}


def useful(rows: Sequence[Recovery], joins: Sequence[float], record: Record) -> dict[str, Any]:
    """Return the ETTR of this run, and the one that it gives at one lost process (or two at once) per so many seconds.

    A step counts once, with the median time of those that follow another one without a fault between. A lost process
    costs the mean time until a step is finished, the steps done again, and its part of the joins. What is lost while
    the network is bad counts in the ETTR of this run only, as it says how bad that is.
    """
    steps = record.steps()
    gaps = [b["seconds"] - a["seconds"] for a, b in pairwise(steps) if b["step"] == a["step"] + 1]
    if not gaps:
        return {}
    step = statistics.median(gaps)
    made = {"ettr": len({line["step"] for line in steps[1:]}) * step / (steps[-1]["seconds"] - steps[0]["seconds"])}
    counted = [row for row in rows if row.resume is not None and row.kind not in NEEDS_NETWORK]
    costs = [row.resume + row.steps_lost * step for row in counted if row.resume is not None]
    if costs:
        cost = statistics.mean(costs) + sum(joins) / len(costs)
        made |= {f"ettr_at_one_fault_per_{mtbf}_s": max(0.0, 1 - cost / mtbf) for mtbf in MTBF_SECONDS}
    return made


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return p50 and p95 of those that are known; None without any."""
    known = sorted(value for value in values if value is not None)
    return {f"p{p}": known[-(-len(known) * p // 100) - 1] for p in (50, 95)} if known else None


def print_table(made: dict[str, Any]) -> None:
    """Print p50 and p95 in milliseconds, steps lost, and the part of useful time."""
    worst = made["worst_difference"]
    print(f"FAILED: {made['failure']}" if made["failure"] else f"passed: parameters within {worst:.2g}")
    print(f"{made['faults']} faults in {made['steps']} steps")
    print(f"{'':20}{'faults':>7}" + "".join(f"{name:>14}" for name in _TIMES) + f"{'steps lost':>12}   (ms, p50 / p95)")
    for kind, row in made["kinds"].items():
        texts = "".join(f"{spread_text(row[f'{name}_seconds']):>14}" for name in _TIMES)
        print(f"{kind:20}{row['faults']:>7}{texts}{row['steps_lost']:>12}")
    for name, text in (("join", "joins"), ("step", "steps"), ("bad_network_step", "steps, bad network")):
        print(f"{text:20}{'':7}{'':42}{spread_text(made[f'{name}_seconds']):>14}")
    phases = sum((row["phases"] for row in made["kinds"].values()), Counter[str]())
    print("faults at", ", ".join(f"{phase} {number}" for phase, number in phases.most_common()))
    sources = sum((row["sources"] for row in made["kinds"].values()), Counter[str]())
    print("went on from", ", ".join(f"{source} {number}" for source, number in sources.most_common()) or "-")
    print(", ".join(f"{name} {value:.3f}" for name, value in made.items() if name.startswith("ettr")))


def spread_text(cell: dict[str, float] | None) -> str:
    """Return them in milliseconds."""
    return "-" if cell is None else f"{1e3 * cell['p50']:.0f} / {1e3 * cell['p95']:.0f}"
