"""Simulated step times against measured ones: twenty plans on four unequal emulated devices.

The devices are measured first, as the planner does it, by products of matrices; then by a step of the model itself on
each, all at once and without communication, which is what a profile tells, right before and after the rounds of each
plan: a machine's speed changes within minutes. The simulation with the second is judged, the one with the first stands
beside it. Models are made while all devices are equally fast, and timed while they are not. A quick run takes fewer
rounds of each plan, and stops after QUICK_SECONDS with those it has.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from scipy.stats import kendalltau

from benchmarks.kit.fleet import (
    OwnSpeeds,
    in_fleet,
    measured_seconds,
    run_workers,
    say,
    set_speeds,
    worker_parser,
    write_result,
)
from benchmarks.kit.models import Size, batch, llama, num_parameters
from benchmarks.kit.report import Bar, Row, finish
from benchmarks.kit.smallest import few
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import from_first
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.simulate.simulate import simulate
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.captures import Programs
from hetu_fx_emulate.emulate import EmulateSpec

SPEEDS = (0.8, 0.4, 0.2, 0.2)
EQUAL = (0.45,) * len(SPEEDS)
SIZE = Size(width=256, layers=4, rows=16, tokens=64)
PROFILE_ROWS, PROFILE_ROUNDS = 4, 3
MEASURE_SECONDS = 2.0  # how long devices are measured: several periods of a quota
ERROR_BAR, RANKING_BAR = 0.10, 0.80
TIME_LIMIT_SECONDS, QUICK_SECONDS = 3000, 480


def pipeline(*stages: Stage, micro_batches: int = 1, rows: int = 1) -> Pipeline:
    """Make a pipeline."""
    return Pipeline(stages, share=rows, micro_batches=micro_batches)


def stage(*devices: int, blocks: int | None = None, ratios: tuple[int, ...] = ()) -> Stage:
    """Make a stage."""
    return Stage(devices, ratios, blocks)


def alone(device: int, rows: int) -> Pipeline:
    """Make a replica of one device."""
    return pipeline(stage(device), rows=rows)


TWO = pipeline(stage(0, blocks=3), stage(1, blocks=1), micro_batches=4)
PLANS: Mapping[str, Plan] = {
    "device 0": Plan.single(0),
    "device 1": Plan.single(1),
    "2 replicas, even": Plan.data_parallel((0, 1)),
    "2 replicas, 2:1": Plan.data_parallel((0, 1), (2, 1)),
    "2 replicas, 2:1, 4 micro-batches": Plan(
        tuple(pipeline(stage(device), micro_batches=4, rows=rows) for device, rows in ((0, 2), (1, 1)))
    ),
    "4 replicas, even": Plan.data_parallel((0, 1, 2, 3)),
    "4 replicas, 4:2:1:1": Plan.data_parallel((0, 1, 2, 3), (4, 2, 1, 1)),
    "4 replicas, 4:2:1:1, zero 0": replace(Plan.data_parallel((0, 1, 2, 3), (4, 2, 1, 1)), zero=0),
    "group 0,1, even": Plan.tensor_parallel((0, 1)),
    "group 0,1, 3:1": Plan.tensor_parallel((0, 1), (3, 1)),
    "group 2,3": Plan.tensor_parallel((2, 3)),
    "stages 0,1, even": Plan((pipeline(stage(0), stage(1), micro_batches=4),)),
    "stages 0,1, 3:1": Plan((TWO,)),
    "stages 0,1, 3:1, GPipe": Plan((TWO,), schedule="gpipe"),
    "stages 0,1, 3:1, 8 micro-batches": Plan((replace(TWO, micro_batches=8),)),
    "stages 0,1, 3:1, 2 micro-batches": Plan((replace(TWO, micro_batches=2),)),
    "stages 0,1,2,3": Plan((pipeline(stage(0), stage(1), stage(2), stage(3), micro_batches=8),)),
    "stage 0 and group 2,3": Plan((pipeline(stage(0, blocks=3), stage(2, 3, blocks=1), micro_batches=4),)),
    "pipelines 0,2 and 1,3": Plan(
        (
            pipeline(stage(0, blocks=3), stage(2, blocks=1), micro_batches=4, rows=5),
            pipeline(stage(1, blocks=3), stage(3, blocks=1), micro_batches=4, rows=3),
        )
    ),
    "devices 0, 1 and group 2,3": Plan((alone(0, 4), alone(1, 2), pipeline(stage(2, 3), rows=2))),
}
FIRST = (
    "device 0",
    "4 replicas, 4:2:1:1",
    "stages 0,1, 3:1",
    "group 0,1, 3:1",
    "pipelines 0,2 and 1,3",
    "2 replicas, 2:1",
    "stage 0 and group 2,3",
    "group 2,3",
)
ORDER = (*FIRST, *(name for name in PLANS if name not in FIRST))  # of all kinds, if not all are measured


def main() -> int:
    """Measure in processes, and judge."""
    purpose = "Simulated and measured step times of many plans on unequal emulated devices."
    options = worker_parser("simulator", purpose).parse_args()
    if options.worker is not None:
        return work(options.worker, quick=options.quick)
    spec, arguments = EmulateSpec(speeds=EQUAL), ["--quick"] * options.quick
    return judge(run_workers("simulator", arguments, spec, timeout_seconds=TIME_LIMIT_SECONDS, limit="cgroups"))


def judge(result: Mapping[str, list[dict[str, float]]]) -> int:
    """Turn the rows into bars."""
    rows = result["rows"]
    measured = [row["measured seconds"] for row in rows]
    simulated = [row["simulated seconds"] for row in rows]
    error = statistics.median(abs(ratio_of(row) - 1) for row in rows)
    ranking = float(kendalltau(simulated, measured).statistic)
    bars = [
        Bar("median error of a step's time", error, ERROR_BAR, at_least=False),
        Bar("Kendall's tau of the ranking", 0.0 if math.isnan(ranking) else ranking, RANKING_BAR, at_least=True),
    ]
    return finish("simulator", bars, rows, speeds=SPEEDS, size=str(SIZE), **result["about"])  # type: ignore[arg-type]


def ratio_of(row: Mapping[str, float]) -> float:
    """Return the simulated time over the measured one."""
    return row["simulated seconds"] / row["measured seconds"]


def work(result: Path, *, quick: bool) -> int:
    """Be one rank."""
    start = time.monotonic()
    with in_fleet():
        table, whole = GroupTable(), batch(SIZE.rows, SIZE.tokens)
        program = CapturedProgram.of(Programs(llama(SIZE), None), whole)
        costs = from_first(table, program.costs(SIZE.rows, memory=False))
        set_speeds(SPEEDS)
        cluster = Cluster.measure(table, seconds=MEASURE_SECONDS)
        own = OwnSpeeds(costs, lambda: llama(SIZE), batch(PROFILE_ROWS, SIZE.tokens))
        say(f"by products of matrices\n{cluster}")
        rows: list[Row] = []
        for name in few(ORDER, 2):
            if quick and from_first(table, time.monotonic() - start) > QUICK_SECONDS:
                break
            before = own.seconds(PROFILE_ROUNDS)
            seconds = plan_seconds(PLANS[name], rounds=5 if quick else 11)
            profiled = own.cluster(cluster, [*before, *own.seconds(PROFILE_ROUNDS)])
            paper = {"measured seconds": seconds, **on_paper(PLANS[name], costs, profiled, cluster)}
            rows.append({"plan": name, **paper, "simulated / measured": ratio_of(paper)})
            passed = time.monotonic() - start
            say(f"{passed:.0f} s: {name}: measured {seconds:.3f} s, simulated {paper['simulated seconds']:.3f} s")
            say(f"speeds {[round(device.flops_per_second / 1e9, 1) for device in profiled.devices]}")
        about = {"parameters": num_parameters(llama(SIZE)), "cluster": cluster.to_json()}
        write_result(result, {"rows": rows, "about": about})
    return 0


def plan_seconds(plan: Plan, *, rounds: int) -> float:
    """Return the median time of a step; collective."""
    whole = batch(SIZE.rows, SIZE.tokens)
    return statistics.median(
        measured_seconds(plan, lambda: llama(SIZE), whole, rounds=rounds, equal=EQUAL, speeds=SPEEDS)
    )


def on_paper(plan: Plan, costs: ProgramCosts, profiled: Cluster, unprofiled: Cluster) -> dict[str, float]:
    """Return the seconds of a plan: simulated, by the closed formula, and simulated with speeds of matrix products."""
    return {
        "simulated seconds": simulate(plan, costs, profiled).seconds,
        "formula": predict(plan, costs, profiled).seconds,
        "unprofiled": simulate(plan, costs, unprofiled).seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
