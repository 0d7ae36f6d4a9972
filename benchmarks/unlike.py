"""Ranks of unlike types train one model: predicted beside measured step times.

Rank 0 is on a GPU if there is one, and three ranks are on the host, a core each; without a GPU, all four are on the
host. Devices, messages and collectives are measured as `hetu-fx measure` does, and devices on the model's own blocks,
again before each step. A plan that is made for such devices leaves out those that are too slow to help; so plans in
which all four have work stand beside it: rows by shares, a tensor parallel group, and a pipeline.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.kit.fleet import in_fleet, parallel, rank_here, run_workers, worker_parser, write_result
from benchmarks.kit.models import Size, batch, llama
from benchmarks.kit.report import Bar, Row, finish
from benchmarks.kit.smallest import few
from benchmarks.predicted import Workload
from hetu_fx.comm_ops.wire.consensus import broadcast_from_rank0
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.stage import Pipeline, Stage
from hetu_fx_emulate.emulate import EmulateSpec

BAR = 0.15
"""How far off a prediction may be."""

SIZE = Size(width=256, layers=8, rows=16, tokens=128)
WORLD = 4
CORES = 0.45  # of each rank, where there are fewer cores than ranks
WARM_UP = 3
ALL_AT_WORK: Mapping[str, Plan] = {
    "rows 13:1:1:1": Plan.data_parallel(range(WORLD), (13, 1, 1, 1)),
    "tensor parallel": Plan.tensor_parallel(range(WORLD)),
    "pipeline": Plan(
        (Pipeline((Stage((0,), blocks=5), *(Stage((rank,), blocks=1) for rank in (1, 2, 3))), micro_batches=4),)
    ),
}
TIME_LIMIT_SECONDS = 900


def main() -> int:
    """Run the plans on four ranks, and judge; or be one of them."""
    made = worker_parser("unlike", "One rank on a GPU and three on the host: predicted beside measured step times.")
    options = made.parse_args()
    if options.worker is not None:
        return work(options.worker, quick=options.quick)
    has_cores = len(os.sched_getaffinity(0)) > WORLD
    spec = EmulateSpec(speeds=((1.0,) if has_cores else (CORES,)) * WORLD)
    limit = "affinity" if has_cores else "cgroups"
    given = ["--quick"] * options.quick
    rows = run_workers("unlike", given, spec, timeout_seconds=TIME_LIMIT_SECONDS, limit=limit)["rows"]
    bars = [
        Bar(f"{r['setting']}, predicted off by", abs(r["predicted / measured"] - 1), BAR, at_least=False) for r in rows
    ]
    return finish("unlike", bars, rows)


def device_here() -> torch.device:
    """Return where this rank computes."""
    return torch.device("cuda:0" if rank_here() == 0 and torch.cuda.is_available() else "cpu")


def work(result: Path, *, quick: bool) -> int:
    """Be one rank."""
    with in_fleet():
        device = device_here()
        whole = {name: value.to(device) for name, value in batch(SIZE.rows, SIZE.tokens).items()}
        load = Workload.of(llama(SIZE).to(device), whole, device)
        seen = load.measured()
        chosen = broadcast_from_rank0(load.table, lambda: make_plan(load.costs, seen.on_blocks))
        rows: list[Row] = []
        for name, plan in few({"chosen": chosen, **ALL_AT_WORK}.items(), 2):
            made = parallel(plan, llama(SIZE).to(device), whole)
            for _ in range(WARM_UP):
                made.step()
            rows.append(seen.row(name, plan, made, quick=quick))
        write_result(result, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
