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
from benchmarks.kit.report import Bar, Row, median_ratio, table
from benchmarks.programs.cases import Race, races
from benchmarks.programs.priced import by_speed, run_seconds
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import all_gather_object, broadcast_from_rank0, from_first
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.planner.captured_program import CapturedProgram, PlannedProgram
from hetu_fx.planner.search.problem import Problem, seconds_by_costs
from hetu_fx.planner.searches import HAP
from hetu_fx.planner.values.options import Choice, PlanOptions
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Programs
from hetu_fx_emulate.emulate import EmulateSpec

MEASURE_SECONDS = 1.0  # how long devices are measured: several periods of a quota
PROFILE_ROWS, PROFILE_ROUNDS = 6, 4
ROUNDS, QUICK_ROUNDS = 15, 7
TIME_LIMIT_SECONDS = 900
PROGRAM, SUMMED, SENT = "program", "program, factors summed", "program, factors sent"
AUTO, NEAREST, ROWS = "auto, no program", "nearest plan", "rows by speed"
WITHOUT = (AUTO, NEAREST, ROWS)

NO_SLOWER = 0.97  # what is measured twice differs by so much
PROMISED, KEPT = 1.3, 1.2
"""Where prices say that a program is so many times as fast as the best plan without it, so much must be measured."""


CHOSEN = 1.1
"""What prices choose may take so many times what the fastest takes."""


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
    print(f"{found['cluster']}\n{table(rows)}", file=sys.stderr, flush=True)
    return rows


def bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Return what prices are held to: where they prefer a program it is no slower, where they promise much it is fast.

    And what they prefer of all is next to the best that was measured.
    """
    found: list[Bar] = []
    for race in dict.fromkeys(row["race"] for row in rows):
        own = [row for row in rows if row["race"] == race]
        program, without = next(row for row in own if row["who"] == PROGRAM), [r for r in own if r["who"] in WITHOUT]
        said, best = (min(without, key=lambda row: row[key]) for key in ("predicted ms", "measured ms"))
        promised, gain = said["predicted ms"] / program["predicted ms"], best["measured ms"] / program["measured ms"]
        name = f"{race}: the best without a program by it, predicted {promised:.2f}"
        if promised >= 1:
            bar = KEPT if promised >= PROMISED else NO_SLOWER
            found.append(Bar(name, gain, bar, at_least=True))
        chosen, fastest = (min(own, key=lambda row: row[key]) for key in ("predicted ms", "measured ms"))
        by = chosen["measured ms"] / fastest["measured ms"]
        found.append(Bar(f"{race}: {chosen['who']}, which prices choose, by the fastest", by, CHOSEN, at_least=False))
    return found


def work(result: Path, name: str, *, quick: bool) -> int:
    """Be one rank of a race."""
    race = next(race for race in races(quick=False) if race.name == name)
    subject, equal = race.subject, _equal(race.speeds)
    with in_fleet():
        ranks = GroupTable()
        program = CapturedProgram.of(Programs(subject.make(), None), subject.example)
        costs = from_first(ranks, program.costs(memory=False))
        set_speeds(race.speeds)
        small = {key: value[:PROFILE_ROWS] for key, value in subject.example.items()}
        cluster = measured_cluster(ranks, costs, subject.make, small, seconds=MEASURE_SECONDS, rounds=PROFILE_ROUNDS)
        say(str(cluster))
        set_speeds(equal)
        told = broadcast_from_rank0(
            ranks, lambda: {who: vars(e) for who, e in entries(program.at(costs), cluster).items()}
        )
        entered = {who: Entry(**entry) for who, entry in told.items()}
        steps = {who: Training(race, entry.plan, cluster) for who, entry in entered.items()}
        set_speeds(race.speeds)
        seconds = run_rounds(steps, rounds=QUICK_ROUNDS if quick else ROUNDS)
        phases = all_gather_object(ranks, {who: step.medians() for who, step in steps.items()})
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
    options = PlanOptions.of_program(mixes_rows=planned.program.mixes_rows)
    problem = Problem(Profile(planned.costs), cluster, options, captured=planned)
    found = HAP.find(problem)
    programs = {plan: seconds for plan, seconds in found.items() if plan.has_program}
    near = {plan: seconds for plan, seconds in found.items() if not plan.has_program}
    plans = {PROGRAM: _least(programs)}
    sends = _sends(plans[PROGRAM])
    if others := {plan: seconds for plan, seconds in programs.items() if _sends(plan) != sends}:
        plans[SUMMED if sends else SENT] = _least(others)
    plans[AUTO] = planned.plan(cluster, "auto", choice=Choice.of(forbid="program"))
    plans[ROWS] = by_speed(cluster)
    if near:
        plans[NEAREST] = _least(near)
    whole = {who: replace(plan, name=None).with_blocks(planned.costs.num_blocks) for who, plan in plans.items()}
    return {who: _entry(plan, problem, planned) for who, plan in _once(whole).items()}


def _least(plans: Mapping[Plan, float]) -> Plan:
    return min(plans, key=lambda plan: plans[plan])


def _sends(plan: Plan) -> bool:
    return any(region.factors for *_, stage in plan.stages for region in stage.program)


def _once(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    names = {plan: who for who, plan in reversed(plans.items())}
    return {who: plan for who, plan in plans.items() if names[plan] == who}


def _entry(plan: Plan, problem: Problem, planned: PlannedProgram) -> Entry:
    by_hap = run_seconds(planned.hap, plan, problem.cluster)
    return Entry(plan, by_hap if by_hap < float("inf") else None, seconds_by_costs(plan, problem))


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
            options=hetu_fx.Options(health=calm),
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
