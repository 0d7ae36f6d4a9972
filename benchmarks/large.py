"""A model larger than any device: from no weights on meta to a checkpoint, beside DDP and FSDP2.

`unequal`: four emulated devices with unlike memory (cgroups), which together hold a Llama's training. hetu_fx plans for
the memory that is there, trains and saves, and `from_pretrained` reads what it saved; each process's peak is held
against the planner's word. DDP and FSDP2 on the same devices are shown, dying or not. `even`: the same without limits:
peak and step of zero 3 against FSDP2 with the same `reshard_after_forward`, and against zero 1.

Bytes are resident ones above those of a process that has trained as deep a model of next to no weights in the same way,
under glibc's fixed thresholds, for all contestants; seconds are measured in runs of their own, without these.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from benchmarks.kit.contest import Step, adamw, barrier, loss_of, run_rounds, train_step
from benchmarks.kit.fleet import in_fleet, rank_here, run_in_forks, say, worker_parser, world_here, write_result
from benchmarks.kit.models import Size, batch, llama
from benchmarks.kit.report import Bar, Part, Row, finish
from benchmarks.kit.smallest import few, is_smallest
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.plans.plan import Plan
from hetu_fx_emulate.emulate import EmulateSpec, run

MB = 1 << 20
SIZES = {"smallest": Size(64, 2, 4, 16), "full": Size(1536, 10, 4, 64), "quick": Size(768, 10, 4, 64)}
LIMITS = {"smallest": (1 << 20,) * 4, "full": (4096, 2048, 1500, 1024), "quick": (1600, 1200, 1000, 900)}
"""MB of memory of each device. A program alone takes 550 of them: 6.9 GB are left of the largest, for 4.2 of states."""

FIXED = [f"MALLOC_{name}_=131072" for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD")]
CONTESTANTS = ("hetu_fx", "zero 1", "FSDP2", "DDP")
STEPS, ROUNDS = 3, 7
NARROW = 64
"""Width of a model whose weights count for nothing: its training takes what a process takes for any."""
PEAK_BAR, STEP_BAR, ZERO_BAR, WORD_BAR = 1.05, 1.0, 1.3, 0.1

Save = Callable[[Path], None]
Made = tuple[Step, Save]
Maker = Callable[[Size], Made]


def main() -> int:
    """Measure in processes, and judge."""
    made = worker_parser("large", "A model larger than any device, from meta to a checkpoint.")
    made.add_argument("--part", choices=["unequal", "even"], help="this alone (default: both)")
    made.add_argument("--contestant", choices=CONTESTANTS, help="what a worker trains with")
    made.add_argument("--against", choices=CONTESTANTS, help="what a worker times zero 3 beside")
    made.add_argument("--limits", type=int, nargs="*", default=[], help="MB of memory of each device")
    options = made.parse_args()
    size = "smallest" if is_smallest() else "quick" if options.quick else "full"
    if options.worker is not None:
        if options.against:
            return time_beside(options.against, options.worker, SIZES[size])
        return work(options.worker, SIZES[size], options.contestant, options.limits)
    parts: Mapping[str, Callable[[str], Part]] = {"unequal": unequal, "even": even}
    found = [parts[name](size) for name in ([options.part] if options.part else parts)]
    bars, rows = [bar for own, _ in found for bar in own], [row for _, own in found for row in own]
    return finish("large", bars, rows)


def unequal(size: str) -> Part:
    """Train on devices of unlike memory."""
    limits = LIMITS[size]
    rows = [row for name in few(("hetu_fx", "FSDP2", "DDP")) for row in contest(size, name, limits)]
    own = [row for row in rows if row["contestant"] == "hetu_fx" and "peak MB" in row]
    off = [abs(float(str(row["predicted MB"])) / float(str(row["peak MB"])) - 1) for row in own]
    return [
        Bar("ranks that train and save a checkpoint that from_pretrained reads", len(own), len(limits), at_least=True),
        Bar("largest error of a rank's peak", max(off, default=1.0), WORD_BAR, at_least=False),
    ], rows


def even(size: str) -> Part:
    """Train on devices without limits."""
    rows = [row for name in ("hetu_fx", "zero 1", "FSDP2") for row in contest(size, name, ())]
    peaks = {name: max(_peaks(name, rows)) for name in ("hetu_fx", "FSDP2")}
    rivals = {"FSDP2": STEP_BAR, "zero 1": ZERO_BAR}
    timed = {name: in_processes(size, ["--against", name], ())[0] for name in few(tuple(rivals))}
    return [
        Bar("peak against FSDP2's", peaks["hetu_fx"] / peaks["FSDP2"], PEAK_BAR, at_least=False),
        *(
            Bar(f"step against {name}'s", float(str(row.get("ratio", "inf"))), rivals[name], at_least=False)
            for name, row in timed.items()
        ),
    ], [*rows, *timed.values()]


def _peaks(contestant: str, rows: Sequence[Row]) -> list[float]:
    return [float(str(row.get("peak MB", "inf"))) for row in rows if row["contestant"] == contestant]


def contest(size: str, contestant: str, limits: Sequence[int]) -> list[Row]:
    """Train by one contestant under glibc's fixed thresholds; give each rank's row, or one that says that they died."""
    return in_processes(size, ["--contestant", contestant], limits, FIXED)


def in_processes(size: str, chosen: Sequence[str], limits: Sequence[int], settings: Sequence[str] = ()) -> list[Row]:
    """Run workers; give their rows, or one that says that they died."""
    spec = EmulateSpec(speeds=(0.45,) * 4, memory=tuple(limit * MB for limit in limits))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        given = ["--worker", str(result), *(["--quick"] if size == "quick" else [])]
        given += chosen
        given += ["--limits", *map(str, limits)] if limits else []
        command = ["env", *settings, sys.executable, "-m", "benchmarks.large", *given]
        if is_smallest():
            run_in_forks("large", given, spec)
        status = 0 if is_smallest() else run(spec, command, timeout_seconds=1800)
        if status or not result.exists():
            return [{"contestant": chosen[1], "status": f"died, status {status}"}]
        rows: list[Row] = json.loads(result.read_text())
        if "hetu_fx" in chosen:
            loss = loss_of(LlamaForCausalLM.from_pretrained(Path(folder) / "saved"), data(SIZES[size])).item()
            rows = [{**row, "loss as read": loss} for row in rows]
    return rows


def data(size: Size) -> dict[str, Tensor]:
    """Make the batch of a step."""
    return batch(size.rows, size.tokens)


def work(result: Path, size: Size, contestant: str, limits: Sequence[int]) -> int:
    """Be one rank."""
    with in_fleet():
        say(f"{contestant}: {size}")
        lines: list[Row | None] = [None] * world_here()
        dist.all_gather_object(lines, measured(contestant, size, limits, result.parent / "saved"))
        write_result(result, lines)
    return 0


def time_beside(rival: str, result: Path, size: Size) -> int:
    """Be one rank that times zero 3 and a rival in turns: three trainings at once would not fit a machine of 24 GB."""
    with in_fleet():
        seconds = run_rounds({name: MAKERS[name](size)[0] for name in ("hetu_fx", rival)}, rounds=ROUNDS)
        medians = {name: statistics.median(own) for name, own in seconds.items()}
        row = {"seconds": medians["hetu_fx"], "against": rival, "its seconds": medians[rival]}
        write_result(result, [{**row, "ratio": medians["hetu_fx"] / medians[rival]}])
    return 0


def measured(contestant: str, size: Size, limits: Sequence[int], folder: Path) -> Row:
    """Train for a few steps, and tell this process's peak; hetu_fx saves, too."""
    make = MAKERS[contestant]
    trained(make, replace(size, width=NARROW))
    plan = planned(size, limits) if contestant == "hetu_fx" else Plan.single()
    gc.collect()
    base = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    save = trained(by(plan) if contestant == "hetu_fx" else make, size)
    line = {"contestant": contestant, "rank": rank_here(), "peak MB": (resident("VmHWM") - base) / 1e6}
    if contestant == "hetu_fx":
        assert plan.predicted is not None
        held = {device.rank: device.total_bytes for device in plan.predicted.devices}
        line |= {"predicted MB": held.get(rank_here(), 0) / 1e6, "plan": f"{plan.summary()}, zero {plan.zero}"}
        line |= {"homes": ":".join(map(str, plan.homes)), "base MB": base / 1e6}
        save(folder)
        barrier()
    return line


def trained(make: Maker, size: Size) -> Save:
    """Make a model and train it for a few steps; return what saves it."""
    step, save = make(size)
    for _ in range(STEPS):
        step()
    return save


def planned(size: Size, limits: Sequence[int]) -> Plan:
    """Plan for the memory that is left here beside the program, or by zero 3 where there are no limits."""
    import hetu_fx

    with torch.device("meta"):
        empty = llama(size)
    own = [limit * MB - resident("VmRSS") for limit in limits[rank_here() : rank_here() + 1]]
    cluster = Cluster.on_paper((1e10,) * world_here(), memory_bytes=gathered(own or [1 << 40]))
    zero, forbidden = (None, ()) if limits else (3, ("tensor_parallel",))
    return hetu_fx.plan(empty, data(size), cluster=cluster, zero=zero, forbid=forbidden, optimizer=optimizer_of(empty))


def gathered(own: Sequence[int]) -> list[int]:
    """Give each rank's number to all."""
    found: list[int] = [0] * world_here()
    dist.all_gather_object(found, own[0])
    return found


def resident(name: str) -> int:
    """Return the bytes of memory that are resident here (VmRSS), or the most that were (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def by(plan: Plan) -> Maker:
    """Make a maker of hetu_fx's training under a plan, from meta."""

    def make(size: Size) -> Made:
        import hetu_fx

        with torch.device("meta"):
            empty = llama(size)
        optimizer = optimizer_of(empty)
        model: Any = hetu_fx.auto_parallelize(
            empty, data(size), plan=plan, optimizer=optimizer, data="global", weights="init", device="cpu"
        )
        return train_step(model, optimizer, data(size)), lambda folder: model.hetu.save(folder)

    return make


def replicas(zero: int) -> Maker:
    """Make a maker of hetu_fx's training on equal replicas."""
    return lambda size: by(Plan.data_parallel(world_here(), zero=zero))(size)


def sharded(size: Size) -> Made:
    """Train by fully_shard, block by block, from meta."""
    with torch.device("meta"):
        model = llama(size)
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # type: ignore
    return train_step(model, optimizer_of(model), own_rows(size)), unsaved


def replicated(size: Size) -> Made:
    """Train by DistributedDataParallel."""
    model = DistributedDataParallel(llama(size))
    return train_step(model, optimizer_of(model), own_rows(size)), unsaved


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer that all contestants use: lists of parameters would take a copy of what each rank owns."""
    return adamw(model, foreach=False)


def own_rows(size: Size) -> dict[str, Tensor]:
    """Return this rank's rows of a step."""
    return {name: value.chunk(world_here())[rank_here()] for name, value in data(size).items()}


def unsaved(folder: Path) -> None:
    """Save nothing: it is compared by its steps."""


MAKERS: Mapping[str, Maker] = {"hetu_fx": replicas(3), "zero 1": replicas(1), "FSDP2": sharded, "DDP": replicated}

if __name__ == "__main__":
    sys.exit(main())
