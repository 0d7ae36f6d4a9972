"""What blocks keep for backward, and what a step takes: eager and compiled, by torch's memory budget and `recompute`.

A Llama of 12 blocks on one core, forward and backward. The peak is what torch's allocator has out at the most above
what was there before; the contestants are timed in turns.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

import hetu_fx
from benchmarks.kit.contest import Step, loss_of, run_rounds
from benchmarks.kit.memory import Recorded, measured_step, recording
from benchmarks.kit.models import Size, batch, llama
from benchmarks.kit.report import Bar, finish, median_ratio, parser
from benchmarks.kit.smallest import compiler, least
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.recomputed import RecomputedOps

TIME_BAR, MEMORY_BAR, BUDGET_BAR = 1.00, 0.80, 1.00
PEAKS = 2  # of so many, the least counts


@dataclass(frozen=True)
class Way:
    """How a model is run: by which compiler, with how much kept, and which ops of how many blocks computed again."""

    backend: str | None = None
    budget: float = 1.0
    blocks: int = 0
    ops: RecomputedOps = "all"

    @property
    def plan(self) -> Plan:
        """Return the plan of one device that recomputes so."""
        plan = Plan.single()
        (pipeline,) = plan.pipelines
        (stage,) = pipeline.stages
        return replace(plan, pipelines=(replace(pipeline, stages=(stage.recomputing(self.blocks, self.ops),)),))

    def step(self, size: Size, given: Mapping[str, Tensor]) -> Step:
        """Make a step of the model; the budget is what torch is told meanwhile."""
        model: nn.Module = hetu_fx.auto_parallelize(llama(size), dict(given), plan=self.plan, compile=self.backend)

        def step() -> None:
            with torch._functorch.config.patch(activation_memory_budget=self.budget):
                model.zero_grad()
                loss_of(model, given).backward()

        return step


EAGER, COMPILED, NOTHING, AGAIN = "eager", "compiled", "compiled, budget 0", "compiled, recompute all"


def ways(layers: int) -> Mapping[str, Way]:
    """Return the contestants; the first is what others are compared with."""
    return {
        EAGER: Way(),
        "eager, recompute pointwise": Way(blocks=layers, ops="pointwise"),
        "eager, recompute attention": Way(blocks=layers, ops="attention"),
        "eager, recompute all": Way(blocks=layers),
        COMPILED: Way(compiler()),
        "compiled, budget 0.5": Way(compiler(), 0.5),
        "compiled, budget 0.25": Way(compiler(), 0.25),
        NOTHING: Way(compiler(), 0.0),
        "compiled, recompute pointwise": Way(compiler(), blocks=layers, ops="pointwise"),
        "compiled, recompute attention": Way(compiler(), blocks=layers, ops="attention"),
        AGAIN: Way(compiler(), blocks=layers),
    }


def main() -> int:
    """Measure and judge."""
    made = parser("kept", "What blocks keep for backward, and what a step takes, eager and compiled.")
    made.add_argument("--layers", type=int, default=12, help="how many blocks the model has")
    options = made.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    layers = least(options.layers, 2)  # blocks are such where they repeat
    size = Size(width=256, layers=layers, rows=8, tokens=128)
    given = batch(size.rows, size.tokens)
    steps = {name: way.step(size, given) for name, way in ways(layers).items()}
    peaks = {name: min(peak(step) for _ in range(least(PEAKS, 1))) for name, step in steps.items()}
    seconds = run_rounds(steps, rounds=3 if options.quick else 9)
    bars = [
        Bar(f"{name} over {other}, {what}", value, bar, at_least=False)
        for name, other, what, value, bar in (
            (COMPILED, EAGER, "time", median_ratio(seconds[COMPILED], seconds[EAGER]), TIME_BAR),
            (COMPILED, EAGER, "peak memory", peaks[COMPILED] / peaks[EAGER], MEMORY_BAR),
            (NOTHING, AGAIN, "time", median_ratio(seconds[NOTHING], seconds[AGAIN]), BUDGET_BAR),
        )
    ]
    rows = [
        {
            "way": name,
            "tokens a second": size.rows * size.tokens / median(seconds[name]),
            "over eager": median_ratio(seconds[name], seconds[EAGER]),
            "peak MB": peaks[name] / 1e6,
        }
        for name in steps
    ]
    return finish("kept", bars, rows, layers=options.layers)


def peak(step: Step) -> int:
    """Return the most bytes that a step has out, above what was there before."""
    step()
    gc.collect()
    with recording() as record:
        step()
        with measured_step():
            step()
    return Recorded.of(record).peak_bytes


if __name__ == "__main__":
    sys.exit(main())
