"""Our plans for H800 beside H20 against the best homogeneous ones, beside what Hetu v2 published for the same.

Published (section 9): Llama 32B with 16 H800 and 32 H20 takes 6.05 s a step, Megatron-LM's best plan 10.45 s and
DeepSpeed's 13.78 s; the plans of both groups of devices together are of section 6.2 and appendix C. Ours are steps
predicted by the planner's cost model from the public figures of the devices, which programs do not reach, so that
ratios are compared and not seconds. As in the paper the homogeneous plans are gone through exhaustively.

Two questions are asked of each of the 14 cases. By peaks, on devices that hold what this library counts by default:
our plan is held against the published one and against the best homogeneous one, and the first case's ratios against the
published one.

And as the authors had it, whether their plan is better than a homogeneous one in our model. What decides that:

* an H800 is 3.3 times as fast as an H20, as they measured and their blocks say; by peaks it is 6.7 times as fast, so
  that leaving out 16 H20 beside 16 H800 (cases 2 and 9) would cost little. It is the H800 that reaches less of its
  peak: H20 at 1 / 3.3 of an H800's peak would be twice as fast as they are, and messages count for more than they do;
* states are those of mixed precision: bf16 with a master and two moments in fp32, gradients in fp32, 18 bytes a
  parameter, which asks for pipelines of more stages than the 8 bytes that are counted by default;
* ZeRO is off where they ran elastically (section 9(b): C1 to C6, cases 6 and 11 to 14), so that states are not spread;
* pipelines run 1F1B, as theirs and Megatron-LM's did: zero bubble would make the long even ones up to 9 % faster.

With these our model ranks the authors' plan before every homogeneous one wherever their devices differ or one is lost.
In cases 12 and 14 there are H20 alone, and the published plan is homogeneous itself. Case 14 is the same plan, but for
which groups stand side by side (1 %). In case 12 four pipelines of 2 stages wait less than the published two of 4, and
fit by our count: 72 GB of states beside activations in 86 GB; the authors say that four did not fit without ZeRO, so
that what their runs hold besides is not in our memory model (4 %).
"""

from __future__ import annotations

import sys
from dataclasses import replace

from benchmarks.cases.planning import Case, cases
from benchmarks.kit.report import Bar, Row, finish, parser
from hetu_fx.planner.make_plan import NEGLIGIBLE, make_plan
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.simulate.simulate import simulated_seconds
from hetu_fx.planner.values.options import Choice, PlanOptions
from hetu_fx.planner.values.state import ParameterState
from hetu_fx.plans.plan import Plan

MEGATRON, DEEPSPEED, PUBLISHED = 10.45, 13.78, 6.05  # seconds
TOLERANCE = 0.25
BARRED = "1: 32B, 32 H20 + 16 H800"
MOST_DEVICES = 48
MEASURED = 3.3  # times as fast as an H20 is an H800, as measured
STATE = ParameterState("bf16", gradient="fp32", master="fp32")
ELASTIC = ("6:", "11:", "12:", "13:", "14:")  # cases that were run without ZeRO
EQUAL_DEVICES = ("12:", "14:")
SAME_SPEED = 0.95  # of the best homogeneous plan, where the published one is homogeneous too


def main() -> int:
    """Measure and judge."""
    options = parser("ladder_hetu_v2", "Plans for H800 and H20 over homogeneous ones, as published.").parse_args()
    chosen = [case for case in cases(MOST_DEVICES) if case.published and (case.name == BARRED or not options.quick)]
    rows = [measure(case) for case in chosen]
    inputs = [f"{d.kind} {d.flops_per_second / 1e12:.0f} TFLOP/s" for d in chosen[0].cluster.devices[::47]]
    print(f"inputs: batches of 64 rows of 4096 tokens; {', '.join(dict.fromkeys(inputs))}")
    print(f"published: ours {PUBLISHED} s, Megatron-LM {MEGATRON} s, DeepSpeed {DEEPSPEED} s ({BARRED})")
    return finish("ladder_hetu_v2", [*_bars_of_first(rows), *_bars(rows)], rows)


def _bars_of_first(rows: list[Row]) -> list[Bar]:
    """Return how near the ratios of the case whose seconds were published are to these."""
    barred = next(row for row in rows if row["case"] == BARRED)
    ratios = {who: _number(barred, f"homogeneous / {who}") * PUBLISHED / MEGATRON for who in ("published plan", "ours")}
    return [
        Bar(f"{BARRED}: homogeneous / {who}, over the published ratio", ratio, 1 + sign * TOLERANCE, sign < 0)
        for who, ratio in ratios.items()
        for sign in (-1, 1)
    ]


def _bars(rows: list[Row]) -> list[Bar]:
    slowest = max(_number(row, "ours") / _number(row, "published plan") for row in rows)
    found = [Bar("ours / published plan (slowest)", slowest, 1 + NEGLIGIBLE, False)]
    for row in rows:
        found.append(
            Bar(f"{row['case']}: homogeneous / ours", _number(row, "homogeneous / ours"), 1 - NEGLIGIBLE, True)
        )
        least = 1.0 if "H800" in str(row["case"]) or "31" in str(row["case"]) else SAME_SPEED
        found.append(Bar(f"{row['case']}: {AS_RUN}", _number(row, AS_RUN), least, True))
    return found


AS_RUN = "homogeneous / published plan, as the authors ran them"


def as_run(case: Case) -> Problem:
    """Return the question with what the authors measured, held, and switched off."""
    cluster, profile = case.cluster, case.profile
    slow = min(cluster.devices, key=lambda device: device.speed)
    speeds = {device.rank: MEASURED * slow.flops_per_second for device in cluster.devices if device.kind != slow.kind}
    costs = replace(profile.costs, state=STATE)
    as_theirs = Choice.of(forbid=("zero_bubble", "interleaved"))
    options = PlanOptions(zero=0 if case.name.startswith(ELASTIC) else 1).chosen(as_theirs)
    return Problem(replace(profile, costs=costs), cluster.with_speeds(speeds), options)


def priced(plan: Plan, problem: Problem) -> float:
    """Return the simulated seconds of a published plan, with what it has to recompute to fit."""
    fitted = problem.fit_memory(replace(plan, zero=problem.options.zero))
    run = plan.with_blocks(problem.costs.num_blocks) if fitted is None else fitted[0]
    return simulated_seconds(run, problem.costs, problem.cluster)


def measure(case: Case) -> Row:
    """Price our plan, the best homogeneous one and the published one."""
    ours, even = (make_plan(case.profile, case.cluster, search=search) for search in ("auto", "homogeneous"))
    published = case.published_plan
    assert published is not None
    theirs = priced(published, Problem(case.profile, case.cluster))
    asked = as_run(case)
    there = make_plan(asked.profile, asked.cluster, options=asked.options, search="homogeneous")
    row: dict[str, object] = {
        "case": case.name,
        "ours": _step(ours),
        "published plan": theirs,
        "homogeneous": _step(even),
        "homogeneous / ours": _step(even) / _step(ours),
        "homogeneous / published plan": _step(even) / theirs,
        AS_RUN: _step(there) / priced(published, asked),
    }
    if case.name == BARRED:
        row |= {"Megatron / Hetu v2": MEGATRON / PUBLISHED, "DeepSpeed / Hetu v2": DEEPSPEED / PUBLISHED}
    return row | {"devices of ours": len(ours.devices), "of homogeneous": len(even.devices), "plan": _shape(ours)}


def _number(row: Row, key: str) -> float:
    return float(str(row[key]))


def _step(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.seconds


def _shape(plan: Plan) -> str:
    """Return blocks@devices of each stage, equal pipelines once."""
    shapes = [" > ".join(f"{s.blocks}@{len(s.devices)}" for s in pipeline.stages) for pipeline in plan.pipelines]
    return " | ".join(f"{shapes.count(shape)} x {shape}" for shape in dict.fromkeys(shapes))


if __name__ == "__main__":
    sys.exit(main())
