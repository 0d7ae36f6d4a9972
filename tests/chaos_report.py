"""What came of faults: times, steps lost, and the part of the time that was spent on steps (ETTR)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from tests.chaos_faults import LOSSES, Fault
from tests.chaos_job import ChaosError, Job

MTBF_SECONDS = (15, 60)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came of a fault, in seconds after it.

    Attributes:
        detect: until the launcher knew of all that were lost.
        regroup: until the others, and those that took a lost one's place, began anew.
        resume: until they had finished a step; None if the next fault came before.
        steps_lost: finished steps that had to be done again.
        world: processes after it.
    """

    kind: str
    phase: str
    detect: float
    regroup: float
    resume: float | None
    steps_lost: int
    world: int


def recovery_of(fault: Fault, job: Job, until: float) -> Recovery:
    """Read what came of a lost process from what launcher and script have written; the next fault came at `until`."""
    lost = max(event["seconds"] for event in job.lost(fault.victims))
    start = next(event for event in job.starts() if event["seconds"] > lost)
    first = next((line["seconds"] for line in job.steps(start["seconds"]) if line["seconds"] < until), None)
    return Recovery(
        kind=fault.kind,
        phase=fault.phase,
        detect=lost - fault.done,
        regroup=start["seconds"] - fault.done,
        resume=None if first is None else first - fault.done,
        steps_lost=steps_lost_at(start, job),
        world=len(start["workers"]),
    )


def steps_lost_at(start: dict[str, Any], job: Job) -> int:
    """Return how many steps that were finished before a start are done again after it."""
    finished = max((line["step"] for line in job.steps() if line["seconds"] < start["seconds"]), default=0)
    next_start = min((s["seconds"] for s in job.starts() if s["number"] > start["number"]), default=float("inf"))
    told = [line for line in job.told("resumed", start["seconds"]) if line["seconds"] < next_start]
    return max(0, finished - told[0]["resumed"]) if told else 0


def joins_of(job: Job) -> list[float]:
    """Return for each join the seconds without a step; raises ChaosError if one has cost a step."""
    made = []
    for before, start in pairwise(job.starts()):
        if any(before["seconds"] < event["seconds"] < start["seconds"] for event in job.lost()):
            continue
        if lost := steps_lost_at(start, job):
            raise ChaosError(f"a process that joins at start {start['number']} costs {lost} steps")
        last = [line["seconds"] for line in job.steps() if line["seconds"] < start["seconds"]]
        next_ = job.steps(start["seconds"])
        made += [next_[0]["seconds"] - last[-1]] if last and next_ else []
    return made


def summary(faults: Sequence[Fault], job: Job) -> dict[str, Any]:
    """Sum up by kind of fault: p50 and p95 in seconds, and steps lost; then joins, and the part of useful time."""
    ends = [*(fault.done for fault in faults[1:]), float("inf")]
    rows = [recovery_of(fault, job, until) for fault, until in zip(faults, ends, strict=True) if fault.kind in LOSSES]
    made: dict[str, Any] = {"rows": [asdict(row) for row in rows], "kinds": {}}
    for kind in sorted({fault.kind for fault in faults}):
        chosen = [row for row in rows if row.kind == kind]
        made["kinds"][kind] = {
            "faults": sum(fault.kind == kind for fault in faults),
            "steps_lost": sum(row.steps_lost for row in chosen),
            **{f"{name}_seconds": _spread([getattr(row, name) for row in chosen]) for name in _TIMES},
        }
    joins = joins_of(job)
    return {**made, "join_seconds": _spread(joins), **useful(rows, joins, job)}


_TIMES = ("detect", "regroup", "resume")


def useful(rows: Sequence[Recovery], joins: Sequence[float], job: Job) -> dict[str, Any]:
    """Return the ETTR of this run, and the one that it gives at one lost process (or two at once) per so many seconds.

    A step counts once, with the median time of those that follow another one without a fault between. A lost process
    costs the mean time until a step is finished, the steps done again, and its part of the joins.
    """
    steps = job.steps()
    gaps = [b["seconds"] - a["seconds"] for a, b in pairwise(steps) if b["step"] == a["step"] + 1]
    step = statistics.median(gaps)
    ettr = len({line["step"] for line in steps[1:]}) * step / (steps[-1]["seconds"] - steps[0]["seconds"])
    costs = [row.resume + row.steps_lost * step for row in rows if row.resume is not None]
    made = {"step_seconds": step, "ettr": ettr}
    if costs:
        cost = statistics.mean(costs) + sum(joins) / len(rows)
        made |= {f"ettr_at_one_fault_per_{mtbf}_s": max(0.0, 1 - cost / mtbf) for mtbf in MTBF_SECONDS}
    return made


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = sorted(value for value in values if value is not None)
    return {f"p{p}": known[min(len(known) - 1, len(known) * p // 100)] for p in (50, 95)} if known else None


def print_table(made: dict[str, Any]) -> None:
    """Print p50 and p95 in milliseconds, steps lost, and the part of useful time."""
    print(f"{made['faults']} faults in {made['steps']} steps, parameters within {made['worst_difference']:.2g}")
    print(f"{'':14}{'faults':>8}{'detect':>16}{'regroup':>16}{'resume':>16}{'steps lost':>12}   (ms, p50 / p95)")
    for kind, row in made["kinds"].items():
        texts = [_text(row[f"{name}_seconds"]) for name in _TIMES]
        print(f"{kind:14}{row['faults']:>8}{texts[0]:>16}{texts[1]:>16}{texts[2]:>16}{row['steps_lost']:>12}")
    print(f"{'joins':14}{'':40}{_text(made['join_seconds']):>16}")
    print(", ".join(f"{name} {value:.3f}" for name, value in made.items() if name.startswith("ettr")))


def _text(cell: dict[str, float] | None) -> str:
    return "-" if cell is None else f"{1e3 * cell['p50']:.0f} / {1e3 * cell['p95']:.0f}"
