"""Predicted beside measured step times of the plans that are in use: the one that is chosen, and three others.

The settings are those of the demo and of `benchmarks.unequal` and `benchmarks.straggler`, the last one healthy and with
a device that has become slow. Devices are measured twice: by products of matrices (`Cluster.measure`), as before the
first step, and on the model's own blocks by all at once (`hetu_fx.measure`). Both predictions are simulated, and stand
beside the median of the measured steps; the second is judged. Devices are measured on the blocks again before each
step, as a machine's speed changes within minutes. Terms say where the slowest device's seconds go.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import nn

from benchmarks.kit.contest import slowest, timed
from benchmarks.kit.fleet import (
    Training,
    in_fleet,
    measured_devices,
    run_workers,
    say,
    set_speeds,
    training,
    worker_parser,
    write_result,
)
from benchmarks.kit.models import Size, batch, llama
from benchmarks.kit.report import Bar, Row, finish
from benchmarks.kit.smallest import few, least
from benchmarks.straggler import SIZE as STRAGGLER_SIZE
from benchmarks.straggler import SPEED as STRAGGLER_SPEED
from benchmarks.straggler import WORLD as STRAGGLER_WORLD
from benchmarks.unequal import SIZE as UNEQUAL_SIZE
from benchmarks.unequal import SPEEDS as UNEQUAL_SPEEDS
from examples.demo.data import Text, library_pieces, make_model
from examples.demo.settings import FULL
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import all_gather_object, broadcast_from_rank0, from_first
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.planner.api import OwnBlocks, measure_on_blocks
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.planner.values.options import Choice, PlanOptions
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.tables import short_text
from hetu_fx.program.captures import Programs
from hetu_fx_emulate.emulate import EmulateSpec

BAR = 0.10
CHECK_SECONDS = 1.0  # of blocks, before each step
MEASURE_SECONDS = 2.0  # how long devices are measured: several periods of a quota
OTHERS = 3
ROUNDS, QUICK_ROUNDS = 9, 4
TIME_LIMIT_SECONDS = 3000


@dataclass(frozen=True)
class Setting:
    """Devices, a model and its batch.

    Attributes:
        speeds: cores of each device.
        size: of the model; None: the demo's model and text.
        slow: how many times as long a device takes, unless it is as it should be.
    """

    speeds: tuple[float, ...]
    size: Size | None = None
    slow: Mapping[int, float] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """Make the model, with the same weights in every process."""
        return make_model(FULL) if self.size is None else llama(self.size)

    def batch(self) -> dict[str, torch.Tensor]:
        """Make the batch of a step."""
        if self.size is None:
            return Text(FULL, library_pieces()).batch(0)
        return batch(self.size.rows, self.size.tokens)

    @property
    def now(self) -> tuple[float, ...]:
        """Return the cores of each device as it is now."""
        return tuple(speed / self.slow.get(rank, 1.0) for rank, speed in enumerate(self.speeds))

    @property
    def equal(self) -> tuple[float, ...]:
        """Return the same cores in equal shares: for what is not timed."""
        return (sum(self.speeds) / len(self.speeds),) * len(self.speeds)


SETTINGS: Mapping[str, Setting] = {
    "demo": Setting(FULL.speeds),
    "unequal": Setting(UNEQUAL_SPEEDS, UNEQUAL_SIZE),
    "straggler, healthy": Setting((STRAGGLER_SPEED,) * STRAGGLER_WORLD, STRAGGLER_SIZE),
    "straggler, one slow": Setting((STRAGGLER_SPEED,) * STRAGGLER_WORLD, STRAGGLER_SIZE, {2: 2.0}),
}
FORBIDDEN: Sequence[Sequence[str]] = (
    (),
    ("data_parallel",),
    ("pipeline", "uneven"),
    ("tensor_parallel", "data_parallel"),
    ("pipeline", "data_parallel"),
    ("zero",),
    ("pipeline",),
    ("uneven",),
    ("tensor_parallel",),
)
"""What plans are forbidden, in turn, so that they are of all sorts; the first is the one that is chosen."""


def main() -> int:
    """Run every setting under the emulator, and judge."""
    made = worker_parser("predicted", "Predicted beside measured step times of plans that are in use.")
    made.add_argument("--setting", choices=[*SETTINGS], action="append", help="one of them (default: all)")
    options = made.parse_args()
    names = options.setting or few(SETTINGS)
    if options.worker is not None:
        return work(options.worker, names[0], quick=options.quick)
    rows = [row for name in names for row in _rows_of(name, quick=options.quick)]
    bars = [
        Bar(f"{row['setting']}: {row['plan']}, predicted off by", abs(_ratio(row) - 1), BAR, at_least=False)
        for row in rows
    ]
    return finish("predicted", bars, rows)


def _rows_of(name: str, *, quick: bool) -> list[Row]:
    spec = EmulateSpec(speeds=SETTINGS[name].equal)
    given = ["--setting", name, *["--quick"] * quick]
    found = run_workers("predicted", given, spec, timeout_seconds=TIME_LIMIT_SECONDS, limit="cgroups")
    rows: list[Row] = found["rows"]
    return rows


def _ratio(row: Row) -> float:
    ratio = row["predicted / measured"]
    assert isinstance(ratio, float)
    return ratio


def work(result: Path, name: str, *, quick: bool) -> int:
    """Be one rank of a setting."""
    setting = SETTINGS[name]
    with in_fleet():
        whole = setting.batch()
        load = Workload.of(setting.model(), whole, torch.device("cpu"))
        set_speeds(setting.now)
        seen = load.measured()
        set_speeds(setting.equal)
        rows: list[Row] = []
        for plan in broadcast_from_rank0(load.table, lambda: plans_for(load.costs, seen.on_blocks)):
            set_speeds(setting.now)
            made = training(plan, setting.model, whole, equal=setting.equal, speeds=setting.now)
            rows.append(seen.row(name, plan, made, quick=quick))
        write_result(result, {"rows": rows})
    return 0


@dataclass(frozen=True)
class Workload:
    """A model's costs, and its blocks ready to run on this rank's device."""

    table: GroupTable
    device: torch.device
    costs: ProgramCosts
    blocks: OwnBlocks

    @classmethod
    def of(cls, model: nn.Module, whole: Mapping[str, torch.Tensor], device: torch.device) -> Workload:
        """Capture a model for a batch; both are on the device. Collective."""
        table, program = GroupTable(), CapturedProgram.of(Programs(model, None), whole)
        costs = from_first(table, program.costs(memory=False))
        return cls(table, device, costs, OwnBlocks.of(program, costs, device, table.size))

    def measured(self) -> Seen:
        """Measure the devices as they are now; collective."""
        probed = measured_devices(self.table, seconds=MEASURE_SECONDS, device=str(self.device))
        seen = Seen(self, probed, measure_on_blocks(self.blocks, probed, self.table))
        say(f"by products of matrices\n{seen.by_products}\non blocks\n{seen.on_blocks}")
        return seen


@dataclass(frozen=True)
class Seen:
    """The devices as they were measured: by products of matrices, and on the model's own blocks."""

    load: Workload
    by_products: Cluster
    on_blocks: Cluster

    def row(self, setting: str, plan: Plan, made: Training, *, quick: bool) -> Row:
        """Time steps, and tell what they were predicted to take; collective."""
        check = partial(measure_on_blocks, self.load.blocks, self.by_products, self.load.table, CHECK_SECONDS)
        seconds, speeds = measured_steps(made, check, QUICK_ROUNDS if quick else ROUNDS)
        found = row(setting, plan, self.load.costs, self.by_products, self.by_products.with_speeds(speeds), seconds)
        say(str(found))
        return found


def plans_for(costs: ProgramCosts, cluster: Cluster) -> list[Plan]:
    """Return the plan that is chosen, and others of other sorts."""
    found: list[Plan] = []
    for forbidden in FORBIDDEN:
        plan = make_plan(costs, cluster, options=PlanOptions().chosen(Choice.of(forbid=forbidden)))
        if plan not in found:
            found.append(plan)
    return few(found[: 1 + OTHERS])


@dataclass(frozen=True)
class StepSeconds:
    """What a step took, as the median of several: until the last rank was done, and by rank of which what."""

    total: float
    compute: tuple[float, ...]
    optimizer: tuple[float, ...]


def measured_steps(made: Training, check: Callable[[], Cluster], rounds: int) -> tuple[StepSeconds, dict[int, float]]:
    """Time steps, each after a check of the devices; returns also their median speeds in FLOP/s by rank. Collective.

    The optimizer's step is timed with all that it waits for.
    """
    begun, taken = list[float](), list[float]()
    made.optimizer.register_step_pre_hook(lambda *_: begun.append(perf_counter()))
    made.optimizer.register_step_post_hook(lambda *_: taken.append(perf_counter() - begun.pop()))
    totals, computes, checked = list[float](), list[float](), list[Cluster]()
    for _ in range(least(rounds, 2)):
        checked.append(check())
        totals.append(slowest(timed(made.step)))
        computes.append(made.model.hetu.stats["compute_seconds"])
    found = all_gather_object(GroupTable(), (median(computes), median(taken)))
    speeds = {d.rank: median(one.device(d.rank).flops_per_second for one in checked) for d in checked[0].devices}
    return StepSeconds(median(totals), *zip(*found, strict=True)), speeds


def row(name: str, plan: Plan, costs: ProgramCosts, probed: Cluster, measured: Cluster, seconds: StepSeconds) -> Row:
    """Make a line of the table: terms are those of the device that takes longest by what is predicted."""
    first, predicted = expect(plan, costs, probed), expect(plan, costs, measured)
    slowest_device = max(predicted.devices, key=lambda device: device.total_seconds)
    terms, rank = dict(slowest_device.seconds), slowest_device.rank
    compute, optimizer = seconds.compute[rank], seconds.optimizer[rank]
    return {
        "setting": name,
        "plan": short_text(plan.pipelines),
        "by products": first.seconds,
        "predicted": predicted.seconds,
        "measured": seconds.total,
        "predicted / measured": predicted.seconds / seconds.total,
        "device": rank,
        **terms,
        "compute measured": compute,
        "optimizer measured": optimizer,
        "rest measured": seconds.total - compute - optimizer,
    }


if __name__ == "__main__":
    sys.exit(main())
