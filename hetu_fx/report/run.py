"""A run as its log tells it: what ran, on which devices, by which plans, and what a step of each is on paper.

The log carries the devices and what a step costs, so that steps are simulated where the log is read, not where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from hetu_fx.base.json_values import many
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import HetuFxError
from hetu_fx.planner.simulate.simulate import simulate
from hetu_fx.planner.simulate.simulation import Simulation
from hetu_fx.planner.values.gathered_op import GATHERED_OP, GatheredOp
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
from hetu_fx.report.summary import training_steps
from hetu_fx.report.updates import Entry
from hetu_fx.show.timeline import Counter, Event, Timeline

_OPS = many(GATHERED_OP.values)
_NUMBERS = ("loss", "rows_per_second", "tokens_per_second", "mfu")
_TOLD = ("variant", "rows", "predicted_seconds", "compute_seconds", "host_seconds", *_NUMBERS)


@dataclass(frozen=True)
class LoggedRun:
    """What a log says of a run (`read_run`).

    Attributes:
        log: its entries.
        processes: how many there are.
        steps: the training steps.
        evaluations: the batches without training.
        cluster: the devices, as corrected last; None where nobody knows.
        plans: of all variants that the log has, by name.
        shown: the variants with a plan that have trained, in that order; where none has, all that have a plan.
        gathered: what variants gather because no rule splits it, as told last; nothing of those that gather nothing.
        peak_bytes: the most memory that each process has had, as far as it has told it (0: not); [] where none has.
        on_paper: a step of each variant that is shown, simulated for the rates that its plan was made for.
    """

    log: Sequence[Entry]
    processes: int
    steps: Sequence[Entry]
    evaluations: Sequence[Entry]
    cluster: Cluster | None
    plans: Mapping[str, Plan]
    shown: Sequence[str]
    gathered: Mapping[str, tuple[GatheredOp, ...]]
    peak_bytes: Sequence[int]
    on_paper: Mapping[str, Simulation]

    @property
    def traced(self) -> Mapping[str, Timeline]:
        """Return what devices did in one step of each variant that was traced, in seconds since that step's start."""
        found: dict[str, list[Event]] = {}
        for entry in self._traces:
            spans = [Event(entry["rank"], name, start, end, kind) for name, kind, start, end in entry["spans"]]
            found.setdefault(entry["variant"], []).extend(spans)
        return {name: Timeline(tuple(events), f"one step of {name}, measured") for name, events in found.items()}

    @property
    def traced_at(self) -> Mapping[str, float]:
        """Return when those steps began, in seconds since 1970 by rank 0's clock."""
        return {one["variant"]: one["time"] - one["seconds"] for one in self._traces if one["rank"] == 0}

    @property
    def _traces(self) -> list[Entry]:
        return _entries(self.log, "trace")

    def settled(self, name: str) -> list[Entry]:
        """Return the steps of a variant after its first, which makes its graphs; where there is no other, that one."""
        own = [entry for entry in self.steps if entry["variant"] == name]
        return own[1:] or own

    def seconds(self, name: str) -> float | None:
        """Return the median seconds of a variant's steps; None where it has not trained."""
        return median(entry["seconds"] for entry in self.settled(name)) if self.settled(name) else None

    def compute_seconds(self, name: str) -> list[float]:
        """Return the median compute seconds of a variant's steps by process; [] where nobody has told them."""
        told = [entry["compute_seconds"] for entry in self.settled(name)]
        count = max(map(len, told), default=0)  # the last step of a log has none
        whole = [seconds for seconds in told if len(seconds) == count]
        return [median(column) for column in zip(*whole, strict=True)]


def read_run(log: Sequence[Entry]) -> LoggedRun:
    """Return what a log, as `read_log` returns it, says of a run."""
    steps = training_steps(log)
    told = {entry["name"]: entry for entry in (*log[0]["plans"], *_entries(log, "plan"))}
    plans = {name: Plan.from_json(entry["plan"]) for name, entry in told.items()}
    ran = dict.fromkeys(entry["variant"] for entry in steps)
    shown = [name for name in ran if name in plans] or list(plans)
    gathered = {entry["variant"]: entry["ops"] for entry in _entries(log, "gathered")}
    peaks = [entry["peak_bytes"] for entry in _entries(log, "memory")]
    devices = [entry["cluster"] for entry in _entries(log, "start", "cluster")][-1]
    cluster = None if devices is None else Cluster.from_json(devices)
    return LoggedRun(
        log,
        processes=int(log[0]["processes"]),
        steps=steps,
        evaluations=_entries(log, "evaluation"),
        cluster=cluster,
        plans=plans,
        shown=shown,
        gathered={name: _OPS.read(ops, f"gathered of {name!r}") for name, ops in gathered.items() if ops},
        peak_bytes=list(peaks[-1]) if peaks else [],
        on_paper=_on_paper({name: plans[name] for name in shown}, told, cluster, log[0]["profile"]),
    )


def _entries(log: Sequence[Entry], *events: str) -> list[Entry]:
    return [entry for entry in log if entry["event"] in events]


def _on_paper(
    plans: Mapping[str, Plan], told: Mapping[str, Entry], cluster: Cluster | None, profile: Any
) -> Mapping[str, Simulation]:
    """Return a step of each plan; nothing of those that are for other devices or another model than the log's."""
    if cluster is None or profile is None:
        return {}
    costs, made = Profile.from_json(profile).costs, {}
    for name, plan in plans.items():
        rates = {int(rank): rate for rank, rate in told[name]["rates"].items()}
        try:
            made[name] = simulate(plan, costs, cluster.with_rates(rates))
        except HetuFxError:
            continue
    return made


def timelines(run: LoggedRun) -> list[Timeline]:
    """Return what a trace shows: all steps, then of each variant the step that was traced, and the one on paper.

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
