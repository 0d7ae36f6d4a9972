"""Four unequal devices: step time against DDP with even shares, and against the ideal.

The ideal is total work over total speed, both measured. Every rank computes its fair share of the rows at the
same time as the others, with an eager model of its own and no communication: that gives its speed in rows per
second. One optimizer step for all parameters is divided over the ranks by their speed. What a step is short
of the ideal is communication, imbalance and overhead.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.kit.contest import Step, adamw, run_rounds, timed, train_step
from benchmarks.kit.fleet import in_fleet, run_workers, say, worker_parser, write_result
from benchmarks.kit.models import Size, batch, llama, num_parameters
from benchmarks.kit.report import Bar, Row, finish, median_ratio
from hetu_fx.switching.adapt.health import HealthTracker
from hetu_fx_emulate.emulate import EmulateSpec

SPEEDS = (0.8, 0.4, 0.2, 0.2)
SIZE = Size(width=256, layers=4, rows=64, tokens=256)
IDEAL_BAR = 0.90
DDP_BAR = 1.8
PREDICTED_BAR = 0.1
SETTLING_STEPS = HealthTracker().lasting + 2  # a first one, those that correct the devices' speeds, one that asks
EVEN, FAIR, AUTO = "DDP, even rows", "DDP, rows by speed (inexact mean)", "hetu_fx, plan auto"


def main() -> int:
    """Run the contest under the emulator and judge it."""
    options = worker_parser("unequal", "Step time on four emulated devices of unequal speed.").parse_args()
    if options.worker is not None:
        return work(options.worker, rounds=3 if options.quick else 9)
    return judge(run_workers("unequal", ["--quick"] * options.quick, EmulateSpec(speeds=SPEEDS), timeout_seconds=1800))


def judge(result: Mapping[str, Any]) -> int:
    """Turn the seconds per round into bars and rows."""
    seconds, ideal, predicted = result["seconds"], result["ideal"]["seconds"], result["predicted"]["seconds"]
    bars = [
        Bar("throughput against the ideal", median_ratio(ideal, seconds[AUTO]), IDEAL_BAR, at_least=True),
        Bar("speed-up over DDP, even rows", median_ratio(seconds[EVEN], seconds[AUTO]), DDP_BAR, at_least=True),
        Bar("predicted off by", abs(predicted / statistics.median(seconds[AUTO]) - 1), PREDICTED_BAR, at_least=False),
    ]
    rows = [row(name, values, ideal) for name, values in {**seconds, "ideal": ideal}.items()]
    rows.append({"who": f"{AUTO}, predicted", "seconds a step": predicted})
    return finish("unequal", bars, rows, speeds=SPEEDS, size=str(SIZE), **result["about"])


def row(name: str, seconds: list[float], ideal: list[float]) -> Row:
    """Make a line of the table."""
    median = statistics.median(seconds)
    return {
        "who": name,
        "seconds a step": median,
        "tokens per second": SIZE.rows * SIZE.tokens / median,
        "of the ideal": median_ratio(ideal, seconds),
    }


def work(result: Path, *, rounds: int) -> int:
    """Be one rank of the contest."""
    with in_fleet():
        steps, predicted = contestants()
        ideal = Ideal()
        ideal_seconds = []
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds):
            ideal_seconds.append(ideal.seconds())
            for name, values in run_rounds(steps, rounds=1, warm_up=2 if number == 0 else 0).items():
                seconds[name] += values
        about = {"parameters": num_parameters(llama(SIZE)), "rounds": rounds}
        found = {"seconds": seconds, "ideal": {"seconds": ideal_seconds}, "predicted": {"seconds": predicted}}
        write_result(result, {**found, "about": about})
    return 0


def contestants() -> tuple[dict[str, Step], float]:
    """Make the steps that are compared, each a whole training step of all the rows; return what auto's is predicted."""
    import hetu_fx

    whole = batch(SIZE.rows, SIZE.tokens)
    plain = llama(SIZE)
    optimizer = adamw(plain)
    model = hetu_fx.auto_parallelize(plain, whole, plan="auto", optimizer=optimizer, data="global")
    step = train_step(model, optimizer, whole)
    say(model.hetu.explain())
    for _ in range(SETTLING_STEPS):
        step()
    while model.hetu.is_planning:
        step()
    say(model.hetu.explain())
    steps = {EVEN: ddp_step(SIZE.rows // dist.get_world_size()), FAIR: ddp_step(fair_rows()), AUTO: step}
    return steps, model.hetu.plan.predicted.seconds


def ddp_step(rows: int) -> Step:
    """Make DDP's step with so many rows on this rank; only even rows give it the right mean."""
    model = DistributedDataParallel(llama(SIZE))
    return train_step(model, adamw(model), batch(rows, SIZE.tokens))


def fair_rows() -> int:
    """Give this rank's rows in proportion to its speed."""
    return max(1, round(SIZE.rows * SPEEDS[dist.get_rank()] / sum(SPEEDS)))


class Ideal:
    """Measures total work over total speed, on all ranks at once and without communication."""

    def __init__(self) -> None:
        self.rows = fair_rows()
        self.model = llama(SIZE)
        self.optimizer = adamw(self.model)
        self.batch = batch(self.rows, SIZE.tokens)
        self._compute()
        self.optimizer.step()

    def seconds(self) -> float:
        """Measure one round; collective."""
        rows_per_second = total(self.rows / timed(self._compute))
        steps_per_second = total(1 / timed(self.optimizer.step))
        return SIZE.rows / rows_per_second + 1 / steps_per_second

    def _compute(self) -> None:
        self.optimizer.zero_grad()
        self.model(**self.batch).loss.backward()


def total(value: float) -> float:
    """Add the values of all ranks."""
    added = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(added)
    return added.item()


if __name__ == "__main__":
    sys.exit(main())
