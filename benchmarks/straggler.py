"""Devices that become slow and recover while a model trains: what adapting to them gains, and what it costs.

Three equal emulated devices; CPU quotas slow one, two, one of them more, and give all back. Three contestants train in
turns on them: a model that adapts by itself, told nothing; one that keeps the plan and the homes of the start; one from
which slow devices are dropped, homes and all, the moment they become slow. The optimum of a phase is total work over
total speed: the adapting model's step of the first phase, over the share of the devices' speeds that is left. What the
best plan reaches of it, by simulation, stands beside: rows are whole, and gradients travel no faster.

How fast a device really is, is told by a plain model that every device trains for itself between the steps, all at
once, and of which no contestant is told. A quota gives time and not speed: when a process that may run for 1 ms in 8
goes on, its caches are cold, and the same work takes 3 to 10 % more of a core than at half a core. Cores that share a
processor are faster when neighbours are throttled, and the machine itself is not always equally fast. By that pace a
rate is judged. The share of time that was withheld from a device, in the very stretches of compute that the runtime
timed, stands beside. What a wrong rate costs is what the plan that runs takes more, by simulation at the devices'
paces, than the one that would have been made by these.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.kit.contest import Step, adamw, run_rounds, train_step
from benchmarks.kit.fleet import Alone, in_fleet, run_workers, say, set_speeds, worker_parser, write_result
from benchmarks.kit.models import Size, batch, llama, num_parameters
from benchmarks.kit.report import Bar, Row, finish
from benchmarks.kit.throttle import ThrottleClock
from hetu_fx.comm_ops.wire.consensus import all_gather_object, broadcast_from_rank0
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.simulate.simulate import simulated_seconds
from hetu_fx.program.captures import Programs
from hetu_fx.switching.adapt.health import HealthTracker
from hetu_fx_emulate.emulate import EmulateSpec

SPEED = 0.5  # any two devices fit one core, so that none is slow for standing beside another
WORLD = 3
SIZE = Size(width=384, layers=2, rows=72, tokens=32)  # products: other ops' time per row grows with the rows
TRACE: Mapping[str, Mapping[int, float]] = {
    "normal": {},
    "one slow": {2: 2.0},
    "two slow": {2: 2.0, 1: 3.0},
    "worse": {2: 4.0, 1: 3.0},
    "recovered": {},
}
OPTIMUM_BAR, RATE_BAR, SWITCH_BAR, GAP_BAR, PREDICTED_BAR, LOST_BAR = 0.95, 0.03, 3, 1.5, 0.1, 1.05
ALONE_SECONDS, ALONE_ROWS = 0.25, 12  # about what slow devices have in a step: throttled ones lose more at fewer
STEADY_STEPS, FIRST_STEPS = HealthTracker().lasting + 3, HealthTracker().settling
NOTICED = 1.5  # a rate that is wrong by less is about right
MOST_STEPS = 60  # before a change that is not noticed counts as missed
ADAPTING, FIXED, DROPPING, ALONE = "adapting", "fixed", "dropping", "alone"


@dataclass
class Watched:
    """What the adapting model did from a change of speeds until it had settled.

    Attributes:
        seconds: of each step.
        detected: steps until the rates were known.
        switched: steps from then until the new plan ran.
        after: of these, the steps that began after the plan had been made.
        planning_seconds: what the plan took; 0 if it was known.
        planned_beside: the seconds of steps during which a plan was being made.
        rates: as they were found.
        variant: what runs.
        plan: of it.
        throttled: each device's seconds of compute over those on a core, in the steps that refine rates.
        homes: why parameters' homes have changed, and the seconds that it took.
        predicted: seconds of a step under the plan that runs at last.
    """

    seconds: list[float] = field(default_factory=list)
    detected: int = 0
    switched: int = 0
    after: int = 0
    planning_seconds: float = 0.0
    planned_beside: list[float] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)
    variant: str = ""
    plan: str = ""
    throttled: list[float] = field(default_factory=list)
    homes: list[tuple[str, float]] = field(default_factory=list)
    predicted: float = 0.0


def main() -> int:
    """Run the trace under the emulator and judge it."""
    options = worker_parser("straggler", "Training while devices become slow and recover.").parse_args()
    if options.worker is not None:
        return work(options.worker, rounds=4 if options.quick else 9)
    spec = EmulateSpec(speeds=(SPEED,) * WORLD)
    return judge(run_workers("straggler", ["--quick"] * options.quick, spec, timeout_seconds=1800))


def judge(result: Mapping[str, Any]) -> int:
    """Turn what was measured into bars and rows."""
    rows = [phase_row(name, result["phases"]) for name in TRACE]
    slow = [row for row in rows if TRACE[str(row["phase"])]]
    watched = {name: phase["watched"] for name, phase in result["phases"].items()}
    errors = [error for name in TRACE for error in rate_errors(name, result["phases"])]
    changes = [watched[name] for name in TRACE if name != "normal"]
    bars = [
        *(Bar(f"{row['phase']}: of the optimum", row["of optimum"], OPTIMUM_BAR, at_least=True) for row in rows[1:]),
        Bar("least gain over no adaptation", min(row["over fixed"] for row in slow), 1.0, at_least=True),
        Bar("least gain over dropping", min(row["over dropping"] for row in slow), 1.0, at_least=True),
        Bar("predicted off by, most", max(map(off_by, rows)), PREDICTED_BAR, at_least=False),
        Bar("worst error of a rate", max(errors), RATE_BAR, at_least=False),
        Bar("most that a wrong rate costs", max(phase["lost"] for phase in result["phases"].values()), LOST_BAR, False),
        Bar("steps from plan to switch, most", max(w["after"] for w in changes), SWITCH_BAR, at_least=False),
        Bar("longest step beside planning / before it", max(map(gap, changes)), GAP_BAR, at_least=False),
    ]
    return finish("straggler", bars, rows, speed=SPEED, size=str(SIZE), **result["about"])


def phase_row(name: str, phases: Mapping[str, Any]) -> Row:
    """Make a line of the table."""
    seconds = {who: statistics.median(phases[name]["seconds"][who]) for who in (ADAPTING, FIXED, DROPPING)}
    healthy = statistics.median(phases["normal"]["seconds"][ADAPTING])
    watched, slowness = phases[name]["watched"], phases[name]["slowness"]
    return {
        "phase": name,
        **{f"{who} steps/s": 1 / value for who, value in seconds.items()},
        "of optimum": healthy * WORLD / sum(1 / factor for factor in slowness) / seconds[ADAPTING],
        "of optimum by quotas": healthy * WORLD / sum(quota_speeds(name)) / seconds[ADAPTING],
        "over fixed": seconds[FIXED] / seconds[ADAPTING],
        "over dropping": seconds[DROPPING] / seconds[ADAPTING],
        "predicted s": watched["predicted"],
        "predicted / measured": watched["predicted"] / seconds[ADAPTING],
        "detected after": watched["detected"],
        "switched after": watched["switched"],
        "planning s": watched["planning_seconds"],
        "longest step beside it s": max(watched["planned_beside"], default=0.0),
        "by a plain model": rates_text(dict(enumerate(relative(name, slowness)))),
        "withheld": rates_text(dict(enumerate(throttled_rates(name, phases)))),
        "found": rates_text(watched["rates"]),
        "lost by what was found": phases[name]["lost"],
        "best plan of optimum": phases[name]["reach"],
        "variant": watched["variant"],
        "plan": watched["plan"],
        "homes moved in s": " ".join(f"{seconds:.2g}" for _, seconds in watched["homes"]),
    }


def off_by(row: Row) -> float:
    """Return by how much a phase's steps were predicted wrong."""
    ratio = row["predicted / measured"]
    assert isinstance(ratio, float)
    return abs(ratio - 1)


def rates_text(rates: Mapping[Any, float]) -> str:
    """Name the devices that are slow, with their rates."""
    return " ".join(f"{rank}x{rate:.3g}" for rank, rate in rates.items() if rate > 1 + HealthTracker().threshold)


def quota_speeds(name: str) -> list[float]:
    """Return the devices' quotas in a phase, over those of the first."""
    return [1 / TRACE[name].get(rank, 1.0) for rank in range(WORLD)]


def rate_errors(name: str, phases: Mapping[str, Any]) -> list[float]:
    """Return by how much each slow device's rate was missed."""
    found, paces = phases[name]["watched"]["rates"], relative(name, phases[name]["slowness"])
    return [abs(found.get(str(rank), 1.0) / paces[rank] - 1) for rank in TRACE[name]]


def throttled_rates(name: str, phases: Mapping[str, Any]) -> list[float]:
    """Return how much more of the time is withheld from devices than in the first phase."""
    pairs = zip(phases[name]["watched"]["throttled"], phases["normal"]["watched"]["throttled"], strict=True)
    return relative(name, [now / first for now, first in pairs])


def relative(name: str, rates: Sequence[float]) -> list[float]:
    """Return rates over those of the devices that were left alone, which become faster or slower, too."""
    healthy = statistics.fmean(rate for rank, rate in enumerate(rates) if rank not in TRACE[name])
    return [rate / healthy for rate in rates]


def gap(watched: Mapping[str, Any]) -> float:
    """Return the longest step beside planning over the median of those before, on the same devices; 0 without any."""
    before = watched["seconds"][1 : watched["detected"]] or watched["seconds"]
    return max(watched["planned_beside"], default=0.0) / statistics.median(before)


def work(result: Path, *, rounds: int) -> int:
    """Be one rank of the contest."""
    with in_fleet():
        contest = Contest()
        phases = {name: contest.phase(name, rounds) for name in TRACE}
        about = {"parameters": num_parameters(llama(SIZE)), "rounds": rounds}
        write_result(result, {"phases": phases, "about": about})
    return 0


class Contest:
    """The contestants, and their way through the trace."""

    def __init__(self) -> None:
        self.whole = batch(SIZE.rows, SIZE.tokens)
        self.adapting, step = self._model("auto")
        self.clock = self.adapting.hetu._runtime.clock = ThrottleClock()
        self.alone = Alone(llama(SIZE), batch(ALONE_ROWS, SIZE.tokens), ALONE_SECONDS)
        self.steps: dict[str, Step] = {ADAPTING: step, ALONE: self.alone.run}
        self.dropping: nn.Module | None = None
        self.rates: Mapping[int, float] = {}
        self.first: list[float] = []
        self.costs = CapturedProgram.of(Programs(llama(SIZE), None), self.whole).costs(memory=False)

    def _model(self, plan: Any) -> tuple[nn.Module, Step]:
        import hetu_fx

        plain = llama(SIZE)
        optimizer = adamw(plain)
        model = hetu_fx.auto_parallelize(plain, self.whole, plan=plan, optimizer=optimizer, data="global")
        return model, train_step(model, optimizer, self.whole)

    def phase(self, name: str, rounds: int) -> dict[str, Any]:
        """Change the speeds, let the model adapt, and let the others run beside it; collective."""
        while self.adapting.hetu.is_planning:  # noise in the last phase has asked for a plan
            self.steps[ADAPTING]()
        before, self.rates = self.rates, TRACE[name]
        set_speeds([SPEED / self.rates.get(rank, 1.0) for rank in range(WORLD)])
        watched = self._watch(changes=before != self.rates)
        say(f"{name}: {watched}")
        if self.dropping is None:
            self._start_others()
        self._drop()
        times = run_rounds(self.steps, rounds=rounds, warm_up=1)
        seconds = self.alone.taken()
        self.first = self.first or seconds
        slowness = [now / first for now, first in zip(seconds, self.first, strict=True)]
        say(f"{name}: {slowness}")
        lost, reach = broadcast_from_rank0(
            self.adapting.hetu._runtime.table, lambda: self._simulated(relative(name, slowness))
        )
        found = {"seconds": times, "slowness": slowness, "lost": lost, "reach": reach}
        return {"watched": asdict(watched), **found}

    def _simulated(self, paces: Sequence[float]) -> tuple[float, float]:
        """Return the step of the plan that runs over that of the best, and what the best reaches of the optimum."""
        rates = [max(1.0, pace) for pace in paces]
        known = self.adapting.hetu._adaptation.cluster
        now = known.with_rates(dict(enumerate(rates)))
        best, healthy = make_plan(self.costs, now), make_plan(self.costs, known)
        seconds = simulated_seconds(best, self.costs, now)
        optimum = simulated_seconds(healthy, self.costs, known) * WORLD / sum(1 / rate for rate in rates)
        return simulated_seconds(self.adapting.hetu.plan, self.costs, now) / seconds, optimum / seconds

    def _start_others(self) -> None:
        from hetu_fx.plans.plan import Plan

        start = self.adapting.hetu.plan
        _, self.steps[FIXED] = self._model(start)
        plans = [start, *(Plan.data_parallel(self._healthy(rates)) for rates in TRACE.values() if rates)]
        named = {plan.devices: plan for plan in plans}
        self.dropping, self.steps[DROPPING] = self._model(list(named.values()))

    def _healthy(self, rates: Mapping[int, float]) -> list[int]:
        return [rank for rank in range(WORLD) if rank not in rates]

    def _drop(self) -> None:
        assert self.dropping is not None
        hetu = self.dropping.hetu
        slow, gone = set(self.rates), set(hetu.drained)
        if gone - slow:
            hetu.admit(*sorted(gone - slow))
        if slow - gone:
            hetu.drain(*sorted(slow - gone))

    def _watch(self, *, changes: bool) -> Watched:
        """Train the adapting model until it has noticed the change, and steadily runs what it planned; collective."""
        hetu, watched, steps, steady = self.adapting.hetu, Watched(), 0, 0
        before, asked, asked_at, begun = len(hetu.stats["replanned"]), None, 0.0, list[float]()
        moved, throttles = len(hetu.stats["homes"]), list[float]()
        while steady < (STEADY_STEPS if changes else FIRST_STEPS) and (steps < MOST_STEPS or hetu.is_planning):
            plans = hetu.is_planning
            start = perf_counter()
            self.steps[ADAPTING]()
            dist.barrier()
            watched.seconds.append(perf_counter() - start)
            steps += 1
            if plans:
                begun.append(start - asked_at)
            if hetu._adaptation.replanning.asked not in (None, asked):
                asked, asked_at, begun = hetu._adaptation.replanning.asked, start, []
                plans = True  # it has begun in this step
            if plans:
                watched.planned_beside.append(watched.seconds[-1])
            if not watched.detected and self._noticed():
                watched.detected = steps
            throttles.append(self.clock.taken())
            steady = steady + 1 if self._noticed() and not hetu.is_planning else 0
            if steady:
                self.alone.run()
        watched.throttled = all_gather_object(hetu._runtime.table, statistics.median(throttles[-STEADY_STEPS:]))
        watched.rates, watched.variant = dict(hetu.health), hetu.current
        watched.plan = hetu.plan.summary()
        watched.predicted = hetu.plan.predicted.seconds
        for change in hetu.stats["replanned"][before:]:
            watched.planning_seconds = change.planning_seconds
            watched.switched = change.step - change.asked
        watched.homes = [(move.why, move.seconds) for move in hetu.stats["homes"][moved:] if move.event == "moved"]
        watched.after = sum(seconds >= watched.planning_seconds for seconds in begun)
        return watched

    def _noticed(self) -> bool:
        """Tell whether the rates are known, each about right."""
        found = self.adapting.hetu.health
        pairs = [(found.get(rank, 1.0), self.rates.get(rank, 1.0)) for rank in range(WORLD)]
        return all(max(mine / rate, rate / mine) < NOTICED for mine, rate in pairs)


if __name__ == "__main__":
    sys.exit(main())
