"""Whether `auto` picks well: its plan against plans drawn at random, run for real on four unequal emulated devices.

Devices and their speeds for the model are found as for `benchmarks.simulator`. Each plan is run for some steps in the
same processes, with a new model; then the fastest that were drawn and auto's are run once more, as the fastest of many
measurements is also the luckiest.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import kendalltau
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from benchmarks.cases.drawn_plans import Draw, kind_of
from benchmarks.kit.fleet import (
    in_fleet,
    measured_cluster,
    measured_seconds,
    run_workers,
    say,
    set_speeds,
    worker_parser,
    write_result,
)
from benchmarks.kit.models import Size, batch, llama, num_parameters
from benchmarks.kit.report import Bar, Row, finish
from benchmarks.kit.smallest import few, least
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import broadcast_from_rank0, from_first
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.planner.captured_program import CapturedProgram, PlannedProgram
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.search.device_orders import Space
from hetu_fx.planner.simulate.simulate import simulate
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Programs
from hetu_fx_emulate.emulate import EmulateSpec

SPEEDS = (0.8, 0.4, 0.2, 0.2)
EQUAL = (0.45,) * len(SPEEDS)
SEED = 0
NUM_PLANS, QUICK_PLANS = 30, 6
ROUNDS, QUICK_ROUNDS = 5, 2
FINALISTS = 3  # of those drawn, besides auto's
PROFILE_ROWS, PROFILE_ROUNDS = 4, 5
MEASURE_SECONDS = 2.0  # how long devices are measured: several periods of a quota
BAR = 1.10
TIME_LIMIT_SECONDS = 3000
LLAMA = Size(width=256, layers=4, rows=16, tokens=64)


@dataclass(frozen=True)
class Model:
    """A model and its batch of some rows; the largest is a step's."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    rows: int


def vit() -> nn.Module:
    """Make a ViT of 64 patches."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        image_size=32,
        patch_size=4,
        num_labels=100,
    )
    model: nn.Module = ViTForImageClassification(config)
    return model.train()


def resnet() -> nn.Module:
    """Make a residual net of convolutions with batch norms."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=32, hidden_sizes=[64, 128], depths=[2, 2], layer_type="basic", num_labels=100)
    model: nn.Module = ResNetForImageClassification(config)
    return model.train()


def images(size: int) -> Callable[[int], dict[str, Tensor]]:
    """Return what makes batches of square images."""

    def make(rows: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 100, (rows,), generator=generator)
        return {"pixel_values": torch.randn(rows, 3, size, size, generator=generator), "labels": labels}

    return make


MODELS: Mapping[str, Model] = {
    "llama": Model(lambda: llama(LLAMA), lambda rows: batch(rows, LLAMA.tokens), LLAMA.rows),
    "vit": Model(vit, images(32), 24),
    "conv": Model(resnet, images(64), 24),
}


def main() -> int:
    """Measure each model in processes, and judge."""
    made = worker_parser("auto_choice", "The plan that auto picks against plans drawn at random.")
    made.add_argument("--only", choices=MODELS, help="one model alone")
    options = made.parse_args()
    if options.worker is not None:
        return work(options.worker, options.only, quick=options.quick)
    names = [options.only] if options.only else few(MODELS)
    return judge({name: measured(name, quick=options.quick) for name in names})


def measured(name: str, *, quick: bool) -> dict[str, Any]:
    """Run the plans of a model on the devices."""
    arguments = ["--only", name, *["--quick"] * quick]
    spec = EmulateSpec(speeds=EQUAL)
    found: dict[str, Any] = run_workers(
        "auto_choice", arguments, spec, timeout_seconds=TIME_LIMIT_SECONDS, limit="cgroups"
    )
    return found


def judge(found: Mapping[str, dict[str, Any]]) -> int:
    """Turn the rows of each model into bars."""
    bars = []
    for name, result in found.items():
        ratio = auto_over_best(result["rows"])
        bars.append(Bar(f"{name}: auto's step over that of the best plan drawn", ratio, BAR, at_least=False))
        print(f"{name}: rank correlation {result['tau']:.3f} predicted, {result['simulated tau']:.3f} simulated")
    rows = [{"model": name, **row} for name, result in found.items() for row in result["rows"]]
    about = {name: {key: value for key, value in result.items() if key != "rows"} for name, result in found.items()}
    return finish("auto_choice", bars, rows, speeds=SPEEDS, about=about)


def auto_over_best(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return auto's seconds over the least of plans that were measured as often."""
    most = max(row["rounds"] for row in rows)
    seconds = {row["who"]: row["measured seconds"] for row in rows if row["rounds"] == most}
    best: float = min(value for who, value in seconds.items() if who != "auto")
    return float(seconds["auto"]) / best


def work(result: Path, name: str, *, quick: bool) -> int:
    """Be one rank."""
    with in_fleet():
        contest = Contest.of(MODELS[name], quick=quick)
        contest.run(contest.plans, FINALISTS)
        write_result(result, contest.result())
    return 0


class Contest:
    """Plans of a model, what they are expected to take, and what they took; alike on all ranks."""

    def __init__(
        self, model: Model, plans: Mapping[str, Plan], paper: Mapping[str, Row], about: dict[str, Any], rounds: int
    ) -> None:
        self.model, self.plans, self.paper, self.about, self.rounds = model, plans, paper, about, rounds
        self.seconds: dict[str, list[float]] = {who: [] for who in plans}
        self.start = time.monotonic()

    @classmethod
    def of(cls, model: Model, *, quick: bool) -> Contest:
        """Measure the devices, ask auto and draw the other plans; collective."""
        table, whole = GroupTable(), model.batch(model.rows)
        program = CapturedProgram.of(Programs(model.make(), None), whole)
        costs = from_first(table, program.costs(model.rows))
        set_speeds(SPEEDS)
        small = model.batch(PROFILE_ROWS)
        cluster = measured_cluster(table, costs, model.make, small, seconds=MEASURE_SECONDS, rounds=PROFILE_ROUNDS)
        say(str(cluster))

        def prepare() -> tuple[dict[str, Plan], dict[str, Row]]:
            planned = program.at(costs)
            plans = {"auto": planned.plan(cluster, "auto")}
            drawn = drawn_plans(program, costs, cluster, least(QUICK_PLANS if quick else NUM_PLANS, 1))
            plans |= {f"{kind_of(plan)}: {plan.summary()}": plan for plan in drawn}
            return plans, {who: on_paper(plan, planned, cluster) for who, plan in plans.items()}

        plans, paper = broadcast_from_rank0(table, prepare)
        about = {"parameters": num_parameters(model.make()), "auto": plans["auto"].summary()}
        return cls(model, plans, paper, about, QUICK_ROUNDS if quick else ROUNDS)

    def run(self, plans: Mapping[str, Plan], finalists: int) -> None:
        """Run all plans, then the fastest and auto's once more; collective."""
        for who, plan in plans.items():
            self.measure(who, plan)
        fastest = sorted((who for who in plans if who != "auto"), key=lambda who: statistics.median(self.seconds[who]))
        for who in ("auto", *fastest[:finalists]):
            self.measure(who, plans[who])

    def measure(self, who: str, plan: Plan) -> None:
        """Run a plan; collective."""
        whole = self.model.batch(self.model.rows)
        found = measured_seconds(plan, self.model.make, whole, rounds=self.rounds, equal=EQUAL, speeds=SPEEDS)
        self.seconds[who] += found
        passed = time.monotonic() - self.start
        say(f"{passed:.0f} s: {who}: {statistics.median(found):.3f} s, predicted {self.paper[who]['predicted']:.3f} s")

    def result(self) -> dict[str, Any]:
        """Return the rows of all plans, and how well they are ranked."""
        rows = [self.row(who) for who in self.plans]
        taken = [row["measured seconds"] for row in rows]
        ranked = {"tau": "predicted", "simulated tau": "simulated"}
        taus = {name: float(kendalltau([row[key] for row in rows], taken).statistic) for name, key in ranked.items()}
        return {"rows": rows, **taus, **self.about}

    def row(self, who: str) -> dict[str, Any]:
        """Return a line of the table."""
        seconds = self.seconds[who]
        return {"who": who, **self.paper[who], "measured seconds": statistics.median(seconds), "rounds": len(seconds)}


def drawn_plans(program: CapturedProgram, costs: ProgramCosts, cluster: Cluster, count: int) -> list[Plan]:
    """Draw plans that the program can run."""
    options = PlanOptions.of_program(mixes_rows=program.program.mixes_rows)
    speeds = [device.speed for device in cluster.devices]
    space = Space.of(costs, cluster, options)
    draw = Draw(speeds, space, costs.units, costs.num_blocks, costs.rows, random.Random(SEED))
    return draw.plans(count)


def on_paper(plan: Plan, program: PlannedProgram, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of a plan by the closed formula, and simulated."""
    split = program.costs_of(plan.split) if plan.split else program.costs
    return {
        "predicted": predict(plan, split, cluster).seconds,
        "simulated": simulate(plan, split, cluster).seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
