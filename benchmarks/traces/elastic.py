"""Hetu v2's elastic traces (section 9(b), appendix C.3): devices are lost, and another plan takes over.

Homogeneous: 32 H20 (C1), one of them lost (C2), a node lost (C3). Heterogeneous: 16 H800 and 32 H20 (C4), a node of H20
lost (C5), one H800 lost (C6), its node lost (C7). States are not spread over replicas, so that what a device held is on
another one. Plans are those that the authors ran, and those that are found here for the same devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.cases.planning import Case, cases
from benchmarks.kit.report import Row
from benchmarks.ladder_hetu_v2 import as_run, priced
from benchmarks.traces.published import HEADS, WIDTH, blocks_of, small
from benchmarks.traces.trace import SGD, Trace
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.count.optimizer_state import optimizer_state_of
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.staying import moving
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Programs

MOST_DEVICES = 48
GB = 1e9


@dataclass(frozen=True)
class Configuration:
    """A plan of a trace: its name, the number of its case, and what was published of it.

    `step_seconds` are those of a step, `change_seconds` those of coming from the configuration before: planning, making
    graphs and groups, and moving states, of which most are those of making groups of NCCL.
    """

    name: str
    case: str
    step_seconds: float | None = None
    change_seconds: str = ""


ELASTIC: Mapping[str, tuple[Configuration, ...]] = {
    "homogeneous": (
        Configuration("C1", "12"),
        Configuration("C2", "13", 17.27, "10.39"),
        Configuration("C3", "14"),
    ),
    "heterogeneous": (
        Configuration("C4", "11", 6.91),
        Configuration("C5", "4", None, "10.79 to 14.76"),
        Configuration("C6", "6", None, "10.79 to 14.76"),
        Configuration("C7", "3", None, "10.79 to 14.76"),
    ),
}


@dataclass(frozen=True)
class Stop:
    """A configuration on the devices of the first one: the question, and the authors' plan for it."""

    configuration: Configuration
    problem: Problem
    plan: Plan


def stops(name: str) -> Iterator[Stop]:
    """Yield the configurations of a trace."""
    by_number = {case.name.split(":")[0]: case for case in cases(MOST_DEVICES)}
    first = by_number[ELASTIC[name][0].case]
    for one in ELASTIC[name]:
        case = by_number[one.case]
        plan = replace(case, cluster=first.cluster).published_plan
        assert plan is not None, "the cases of Hetu v2 have one"
        yield Stop(one, _asked(case, first, plan.devices), replace(plan.with_blocks(blocks_of(case)), zero=0))


def _asked(case: Case, first: Case, ranks: tuple[int, ...]) -> Problem:
    """Return a case as a question about those of the first one's devices that are left."""
    problem = as_run(replace(first, profile=case.profile))
    left = tuple(device for device in problem.cluster.devices if device.rank in ranks)
    return replace(problem, cluster=replace(problem.cluster, devices=left), options=replace(problem.options, zero=0))


def changes(name: str) -> Iterator[Row]:
    """Yield what steps take in each configuration, and the change from the one before."""
    found = list(stops(name))
    ours = [_found(stop) for stop in found]
    theirs = [stop.plan for stop in found]
    moved, own = (
        [("", ""), *(_move(*pair, stop.problem) for pair, stop in zip(pairwise(plans), found[1:], strict=True))]
        for plans in (theirs, ours)
    )
    for stop, mine, change, own_change in zip(found, ours, moved, own, strict=True):
        yield {
            "paper": "Hetu v2",
            "trace": name,
            "configuration": stop.configuration.name,
            "devices": len(stop.problem.cluster.devices),
            "authors' plan s": round(priced(stop.plan, stop.problem), 3),
            "published s": stop.configuration.step_seconds or "",
            "ours s": round(priced(mine, stop.problem), 3),
            "moved GB": change[0],
            "moved s": change[1],
            "published change s": stop.configuration.change_seconds,
            "ours moved GB": own_change[0],
            "ours moved s": own_change[1],
        }


def elastic(name: str) -> Trace:
    """Return a trace, to be executed with a step in each configuration: what lost devices held comes from others."""
    plans = tuple(small(stop.plan) for stop in stops(name))
    lost = tuple(frozenset(plans[0].devices) - frozenset(plan.devices) for plan in plans)
    blocks = sum(stage.blocks or 0 for stage in plans[0].pipelines[0].stages)
    return Trace("Hetu v2", f"{name} trace", plans, blocks, WIDTH, HEADS, lost=lost)


def priced_bytes(trace: Trace) -> Iterator[float]:
    """Yield the bytes that each change of an elastic trace's small model moves, as the planner prices it."""
    model, plans, lost = trace.model(), trace.plans, trace.lost or ()
    program = CapturedProgram.of(Programs(model, None), trace.batches()[0])
    state = optimizer_state_of(list(model.parameters()), SGD(model.parameters()))
    costs = replace(program.costs(memory=False), state=state)
    every = Cluster.on_paper([1.0] * (1 + max(plans[0].devices)))
    for (before, after), gone in zip(pairwise(plans), lost[1:], strict=True):
        left = replace(every, devices=tuple(device for device in every.devices if device.rank not in gone))
        yield moving(before, after, costs, left).bytes


def _found(stop: Stop) -> Plan:
    problem = stop.problem
    made = make_plan(problem.profile, problem.cluster, options=problem.options)
    return replace(made.with_blocks(problem.costs.num_blocks), zero=0)


def _move(before: Plan, after: Plan, problem: Problem) -> tuple[float | str, float | str]:
    """Return the GB and the seconds of a change, in which devices that are lost give nothing.

    Searches do not know of failures: all copies of a stage may stand on a node, and be lost with it.
    """
    try:
        found = moving(before, after, problem.costs, problem.cluster)
    except PlanError:
        return "lost", "lost"
    return round(found.bytes / GB, 2), round(found.seconds(problem.cluster), 3)
