"""The planner's memory model against the real peak of every process.

Measured is what torch's own allocator has handed out and not got back (`kit.memory`), from before the model is made;
the most during one training step counts, the least of `TIMES`. Predicted is what the planner knows before it runs.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.kit.contest import train_step
from benchmarks.kit.fleet import in_fleet, run_workers, say, worker_parser, write_result
from benchmarks.kit.memory import Recorded, measured_step, recording
from benchmarks.kit.models import Size, batch, gpt2, llama
from benchmarks.kit.report import Bar, Row, finish
from benchmarks.kit.smallest import few
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.price.placement import device_bytes
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.captures import Programs
from hetu_fx_emulate.emulate import EmulateSpec

RANKS = 4
BLOCKS = 4
TIMES = 3
BAR = 0.10


def pipeline(*stages: tuple[int, ...], micro_batches: int = 1, rows: int = 1) -> Pipeline:
    """Make a pipeline of stages of these devices."""
    return Pipeline(tuple(Stage(devices) for devices in stages), share=rows, micro_batches=micro_batches)


def again(devices: tuple[int, ...], context: int = 1) -> Plan:
    """Make a plan of one group that recomputes all blocks."""
    return Plan((Pipeline((Stage(devices, context=context, recompute=BLOCKS),)),))


PLANS = {
    "one device": Plan.single(),
    "2 replicas": Plan.data_parallel((0, 1)),
    "2 replicas, zero 0": replace(Plan.data_parallel((0, 1)), zero=0),
    "2 replicas, zero 2": Plan.data_parallel((0, 1), zero=2),
    "2 replicas, zero 3": Plan.data_parallel((0, 1), zero=3),
    "4 replicas, zero 3": Plan.data_parallel(4, zero=3),
    "2 replicas, zero 3, all blocks recomputed": Plan(
        tuple(Pipeline((Stage((rank,), recompute=BLOCKS),)) for rank in range(2)), zero=3
    ),
    "tensor parallel 2 x 2 replicas, zero 3": Plan((pipeline((0, 1)), pipeline((2, 3))), zero=3),
    "2 replicas, rows 3:1": Plan.data_parallel((0, 1), (3, 1)),
    "2 replicas, 4 micro-batches": Plan((pipeline((0,), micro_batches=4), pipeline((1,), micro_batches=4))),
    "tensor parallel 2": Plan.tensor_parallel((0, 1)),
    "tensor parallel 2, sequence shared": replace(Plan.tensor_parallel((0, 1)), sequence_parallel=True),
    "context parallel 2": Plan.context_parallel((0, 1)),
    "one device, 2 blocks recomputed": Plan((Pipeline((Stage((0,), recompute=2),)),)),
    "one device, all blocks recomputed": again((0,)),
    "2 stages, GPipe, a block of each recomputed": Plan(
        (Pipeline((Stage((0,), recompute=1), Stage((1,), recompute=1)), micro_batches=4),), schedule="gpipe"
    ),
    "tensor parallel 2, all blocks recomputed": again((0, 1)),
    "tensor parallel 2, sequence shared, all blocks recomputed": replace(again((0, 1)), sequence_parallel=True),
    "context parallel 2, all blocks recomputed": again((0, 1), context=2),
    "tensor parallel 2 x context 2": Plan((Pipeline((Stage((0, 1, 2, 3), context=2),)),)),
    "tensor parallel 2 x context 2, all blocks recomputed": again((0, 1, 2, 3), context=2),
    "2 stages, 1F1B": Plan((pipeline((0,), (1,), micro_batches=4),)),
    "2 stages, GPipe": Plan((pipeline((0,), (1,), micro_batches=4),), schedule="gpipe"),
    "2 stages, interleaved": Plan((pipeline((0,), (1,), micro_batches=4),), schedule="interleaved"),
    "2 stages, interleaved zero bubble": Plan(
        (pipeline((0,), (1,), micro_batches=4),), schedule="zero-bubble", chunks=2
    ),
    "2 stages x tensor parallel 2, interleaved": Plan(
        (pipeline((0, 1), (2, 3), micro_batches=4),), schedule="interleaved"
    ),
    "2 stages x tensor parallel 2": Plan((pipeline((0, 1), (2, 3), micro_batches=4),)),
    "2 replicas x 2 stages": Plan((pipeline((0,), (1,), micro_batches=2), pipeline((2,), (3,), micro_batches=2))),
    "unequal replicas": Plan((pipeline((0, 1), (2,), micro_batches=2, rows=3), pipeline((3,)))),
}
MODELS: Mapping[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "llama": (lambda: llama(Size(width=128, layers=BLOCKS, rows=16, tokens=64)), batch(16, 64)),
    "gpt2": (lambda: gpt2(128, BLOCKS), batch(16, 64)),
    "llama, wide": (lambda: llama(Size(width=256, layers=BLOCKS, rows=4, tokens=16)), batch(4, 16)),
    "llama, several buckets": (lambda: llama(Size(width=768, layers=BLOCKS, rows=4, tokens=64)), batch(4, 64)),
}
QUICK = ("one device", "2 replicas", "2 stages x tensor parallel 2")


def main() -> int:
    """Measure in processes, and judge."""
    made = worker_parser("memory_model", "Predicted and measured peak memory of every process.")
    made.add_argument("--models", nargs="+", choices=[*MODELS], help="of these alone (default: all)")
    made.add_argument("--plans", help="of those alone that have this in their name (default: all)")
    options = made.parse_args()
    if options.worker is not None:
        return work(options.worker, cases(options.quick, options.models, options.plans or ""))
    spec, arguments = EmulateSpec(speeds=(1.0,) * RANKS), ["--quick"] * options.quick
    arguments += ["--models", *options.models] if options.models else []
    arguments += ["--plans", options.plans] if options.plans else []
    return judge(run_workers("memory_model", arguments, spec, timeout_seconds=2400, limit="affinity"))


def judge(rows: list[dict[str, object]]) -> int:
    """Turn the rows into bars."""
    off = [abs(float(str(row["predicted / measured"])) - 1) for row in rows]
    bars = [
        Bar("largest error of a peak", max(off), BAR, at_least=False),
        Bar("median error of a peak", statistics.median(off), BAR, at_least=False),
    ]
    return finish("memory_model", bars, rows)


def work(result: Path, asked: Mapping[str, Iterable[str]]) -> int:
    """Be one rank."""
    with in_fleet():
        write_result(result, [line for model, plans in asked.items() for line in lines_of(model, plans)])
    return 0


def cases(quick: bool, models: Iterable[str] | None, named: str) -> Mapping[str, Iterable[str]]:
    """Give the plans by model: some of them, where not all are asked for."""
    plans = few((plan for plan in (QUICK if quick else PLANS) if named in plan), 2)
    return dict.fromkeys(models or (("llama",) if quick else MODELS), plans)


def lines_of(model: str, plans: Iterable[str]) -> list[Row]:
    """Make a model's lines; collective."""
    costs = costs_of(model)
    return [line for plan in plans for line in compare(model, plan, costs)]


def compare(model_name: str, plan_name: str, costs: ProgramCosts) -> list[Row]:
    """Measure a case on all ranks; collective."""
    make, whole = MODELS[model_name]
    plan = PLANS[plan_name]
    say(f"{model_name}, {plan_name}")
    peaks: list[int] = [0] * RANKS
    dist.all_gather_object(peaks, min(measured_peak(make, whole, plan) for _ in range(TIMES)))
    predicted = device_bytes(plan, costs, dict.fromkeys(range(RANKS), 1.0))
    return [row(model_name, plan_name, rank, peaks[rank], dict(predicted[rank])) for rank in plan.devices]


def row(model: str, plan: str, rank: int, peak: int, predicted: Mapping[str, int]) -> Row:
    """Make a line of the table."""
    total = sum(predicted.values())
    head = {"model": model, "plan": plan, "rank": rank, "predicted MB": total / 1e6, "measured MB": peak / 1e6}
    return head | {"predicted / measured": total / peak} | {term: count / 1e6 for term, count in predicted.items()}


def costs_of(model_name: str) -> ProgramCosts:
    """Return what the planner knows of a model."""
    make, whole = MODELS[model_name]
    return CapturedProgram.of(Programs(make(), None), whole).costs(len(whole["input_ids"]))


def measured_peak(make: Callable[[], nn.Module], whole: dict[str, Tensor], plan: Plan) -> int:
    """Return the most bytes that this process's allocator has out during a step; collective."""
    import hetu_fx

    gc.collect()
    with recording() as record:
        plain = make()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        model = hetu_fx.auto_parallelize(plain, whole, plan=plan, optimizer=optimizer, data="global")
        step = train_step(model, optimizer, whole)
        step()
        step()
        gc.collect()
        with measured_step():
            step()
    return Recorded.of(record).peak_bytes


if __name__ == "__main__":
    sys.exit(main())
