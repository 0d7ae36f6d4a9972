"""Programs on throttled processes, beside the best plan without one, the nearest, and rows for each device by speed.

Devices are measured first: their speed by the model itself, links by messages, and the collectives of all. What is
found and priced for that cluster runs in turns, in one process for each device.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hetu_fx
from benchmarks.kit.contest import adamw, loss_of, run_rounds
from benchmarks.kit.fleet import in_fleet, measured_cluster, run_workers, say, set_speeds, write_result
from benchmarks.kit.report import Bar, Row, median_ratio
from benchmarks.programs.cases import Race, races
from benchmarks.programs.priced import best_near, by_speed, found_program, run_seconds
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.links import TimedGroup, time_collectives
from hetu_fx.comm_ops.wire.consensus import by_first, from_first, of_all
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.emulate.emulate import EmulateSpec
from hetu_fx.planner.captured_program import CapturedProgram, PlannedProgram
from hetu_fx.planner.search.problem import widest
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Programs

MEASURE_SECONDS = 1.0  # how long devices are measured: several periods of a quota
PROFILE_ROWS, PROFILE_ROUNDS = 6, 4
ROUNDS, QUICK_ROUNDS = 15, 7
TIME_LIMIT_SECONDS = 900
PROGRAM, SUMMED, SENT = "program", "program, factors summed", "program, factors sent"
AUTO, NEAREST, ROWS = "auto, no program", "nearest plan", "rows by speed"
WITHOUT = (AUTO, NEAREST, ROWS)

NO_SLOWER = 1.0 / 0.97  # what is measured twice differs by so much
PROMISED, KEPT = 1.3, 1.2
"""Where prices say that a program is so many times as fast as the best plan without it, so much must be measured."""


def measured(race: Race, *, quick: bool, link_megabits: int | None) -> list[Row]:
    """Run a race on emulated devices, on a node each if links are limited."""
    link = link_megabits or race.link_megabits
    equal = _equal(race.speeds)
    spec = EmulateSpec(speeds=equal)
    if link is not None:
        spec = EmulateSpec(speeds=equal, num_nodes=len(equal), link_bits_per_second=link * 10**6)
    given = ["--race", race.name, *["--quick"] * quick]
    found = run_workers("programs", given, spec, timeout_seconds=TIME_LIMIT_SECONDS, limit="cgroups")
    rows: list[Row] = found["rows"]
    print(found["cluster"], file=sys.stderr)
    return rows


def bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Return what programs are held to beside the best plan without one."""
    found: list[Bar] = []
    for race in dict.fromkeys(row["race"] for row in rows):
        own = {row["who"]: row for row in rows if row["race"] == race}
        best = min((own[who] for who in WITHOUT if who in own), key=lambda row: row["measured ms"])
        gain = best["measured ms"] / own[PROGRAM]["measured ms"]
        name = f"{race}: the best without a program, {best['who']}, by the program"
        found.append(Bar(name, gain, 1 / NO_SLOWER, at_least=True))
        promised = min(own[who]["predicted ms"] for who in WITHOUT if who in own) / own[PROGRAM]["predicted ms"]
        if promised >= PROMISED:
            found.append(Bar(f"{name}, predicted {promised:.2f}", gain, KEPT, at_least=True))
    return found


def work(result: Path, name: str, *, quick: bool) -> int:
    """Be one rank of a race."""
    race = next(race for race in races(quick=False) if race.name == name)
    subject, equal = race.subject, _equal(race.speeds)
    with in_fleet():
        table = GroupTable()
        program = CapturedProgram.of(Programs(subject.make(), None), subject.example)
        costs = from_first(table, program.costs(memory=False))
        set_speeds(race.speeds)
        small = {key: value[:PROFILE_ROWS] for key, value in subject.example.items()}
        cluster = measured_cluster(table, costs, subject.make, small, seconds=MEASURE_SECONDS, rounds=PROFILE_ROUNDS)
        groups = [TimedGroup(where, ranks) for where, ranks in cluster.groups.items()]
        cluster = replace(cluster, collectives=time_collectives(table, groups))
        say(str(cluster))
        set_speeds(equal)
        entered = by_first(table, lambda: entries(program.at(costs), cluster))
        steps = {who: Training(race, entry.plan, cluster) for who, entry in entered.items()}
        set_speeds(race.speeds)
        seconds = run_rounds(steps, rounds=QUICK_ROUNDS if quick else ROUNDS)
        phases = of_all(table, {who: step.medians() for who, step in steps.items()})
        rows = [_row(race, who, entry, seconds) | _slowest(who, phases) for who, entry in entered.items()]
        write_result(result, {"rows": rows, "cluster": str(cluster)})
    return 0


@dataclass(frozen=True)
class Entry:
    """A plan that takes part: its seconds by HAP's prices (None: they do not tell), and as all plans are predicted."""

    plan: Plan
    by_hap: float | None
    predicted: float


def entries(planned: PlannedProgram, cluster: Cluster) -> dict[str, Entry]:
    """Return who takes part; a plan that two would run takes part once."""
    found = found_program(planned.hap, cluster, factors=True)
    plans = {
        PROGRAM: found.plan,
        SUMMED: without_factors(found.plan),
        AUTO: planned.plan(cluster, "auto"),
        ROWS: by_speed(cluster),
    }
    near = best_near(planned.hap, found.found, cluster)
    if near is not None:
        plans[NEAREST] = near
    return {who: _entry(plan, planned, cluster) for who, plan in _once(plans).items()}


def without_factors(plan: Plan) -> Plan:
    """Return a plan with a program that sends no factors."""
    ((stage,),) = (pipeline.stages for pipeline in plan.pipelines)
    program = tuple(replace(region, factors=False) for region in stage.program)
    return replace(plan, pipelines=(replace(plan.pipelines[0], stages=(replace(stage, program=program),)),))


def _once(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    names = {plan: who for who, plan in reversed(plans.items())}
    return {who: plan for who, plan in plans.items() if names[plan] == who}


def _entry(plan: Plan, planned: PlannedProgram, cluster: Cluster) -> Entry:
    by_hap = run_seconds(planned.hap, plan, cluster)
    costs = planned.costs_of(plan.split, widest(plan)) if plan.split else planned.costs
    expected = planned.expect(plan, cluster) if plan.has_program else expect(plan, costs, cluster)
    return Entry(plan, by_hap if by_hap < float("inf") else None, expected.seconds)


def _equal(speeds: Sequence[float]) -> tuple[float, ...]:
    return (sum(speeds) / len(speeds),) * len(speeds)


class Training:
    """A step of the ordinary loop under a plan, which remembers what its phases took."""

    def __init__(self, race: Race, plan: Plan, cluster: Cluster) -> None:
        self._model, self._batch = race.subject.make(), race.subject.example
        self._optimizer = adamw(self._model)
        calm = {"patience": 10**6}  # the plan is to stay, whatever it takes
        hetu_fx.auto_parallelize(
            self._model,
            self._batch,
            plan=plan,
            cluster=cluster,
            optimizer=self._optimizer,
            data="global",
            health=calm,
        )
        self._taken: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
        self()

    def __call__(self) -> None:
        """Do a step."""
        start = time.perf_counter()
        self._optimizer.zero_grad()
        loss = loss_of(self._model, self._batch)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self._optimizer.step()
        taken = (forward - start, backward - forward, time.perf_counter() - backward)
        for seconds, phase in zip(taken, self._taken.values(), strict=True):
            phase.append(seconds)

    def medians(self) -> dict[str, float]:
        """Return the median seconds of each phase on this device."""
        return {phase: statistics.median(seconds) for phase, seconds in self._taken.items()}


def _slowest(who: str, phases: Sequence[Mapping[str, Mapping[str, float]]]) -> Row:
    """Return the milliseconds of each phase on the device that it takes longest."""
    return {f"{phase} ms": 1e3 * max(one[who][phase] for one in phases) for phase in phases[0][who]}


def _row(race: Race, who: str, entry: Entry, seconds: Mapping[str, list[float]]) -> dict[str, object]:
    median, by_hap = statistics.median(seconds[who]), entry.by_hap
    return {
        "race": race.name,
        "devices": len(race.speeds),
        "who": who,
        "by HAP ms": None if by_hap is None else 1e3 * by_hap,
        "predicted ms": 1e3 * entry.predicted,
        "measured ms": 1e3 * median,
        "predicted / measured": entry.predicted / median,
        "measured / program": median_ratio(seconds[who], seconds[PROGRAM]),
        "plan": _said(entry.plan),
    }


def _said(plan: Plan) -> str:
    regions = plan.pipelines[0].stages[0].program
    return f"{plan.summary()}; {len(regions)} regions" if regions else plan.summary()
