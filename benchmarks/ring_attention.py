"""Context parallel attention of two devices on two emulated nodes: keys and values gathered, in a ring, and by cost.

One causal attention layer with its projections, forward and backward, at several lengths of the sequence. The link
takes no processor time, so that a ring can hide its transfers.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetu_fx
from benchmarks.kit.contest import Step, barrier, run_rounds
from benchmarks.kit.fleet import run_workers, worker_parser
from benchmarks.kit.report import Bar, Row, finish, median_ratio
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.plans.plan import Plan
from hetu_fx_emulate.emulate import EmulateSpec

WORLD, LINK_BITS_PER_SECOND, SPEED = 2, 100e6, 0.4
HEADS, WIDTH = 4, 256
WAYS = ("gathered", "ring", "auto")
LENGTHS, QUICK_LENGTHS = (256, 1024, 4096), (256, 1024)
CHOICE_BAR = 1.15
Times = Mapping[str, Mapping[str, list[float]]]


class Layer(nn.Module):
    """Causal attention with its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inward(x).chunk(3, -1)
        query, key, value = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return (self.out(y.transpose(1, 2).flatten(2)) ** 2).mean()


def main() -> int:
    """Run under the emulator and judge."""
    made = worker_parser("ring_attention", "Context parallel attention over a link between nodes.")
    options = made.parse_args()
    lengths, rounds = (QUICK_LENGTHS, 3) if options.quick else (LENGTHS, 5)
    if options.worker is not None:
        return work(options.worker, lengths, rounds)
    spec = EmulateSpec(speeds=(SPEED,) * WORLD, num_nodes=WORLD, link_bits_per_second=LINK_BITS_PER_SECOND)
    return judge(run_workers("ring_attention", ["--quick"] * options.quick, spec, timeout_seconds=900))


def judge(times: Times) -> int:
    """Turn seconds into bars and rows."""
    bars, rows = [], []
    for length, seconds in times.items():
        better = min(("gathered", "ring"), key=lambda way: statistics.median(seconds[way]))
        excess = median_ratio(seconds["auto"], seconds[better])
        bars.append(Bar(f"chosen by cost over the better, {length} tokens", excess, CHOICE_BAR, at_least=False))
        told: Row = {f"{way}, ms": statistics.median(seconds[way]) * 1e3 for way in WAYS}
        rows.append({"tokens": length, **told})
    return finish("ring_attention", bars, rows, link_bits_per_second=LINK_BITS_PER_SECOND)


def work(result: Path, lengths: tuple[int, ...], rounds: int) -> int:
    """Be one rank: time every length, and let rank 0 write {length: {way: seconds}}."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.set_num_threads(1)
    table = GroupTable()
    with using(table):
        cluster = Cluster.measure(table, seconds=0.5)
    times: dict[str, Any] = {}
    for length in lengths:
        times[str(length)] = run_rounds(steps(length, cluster), rounds=rounds, warm_up=1)
    if table.rank == 0:
        result.write_text(json.dumps(times))
    barrier()
    dist.destroy_process_group()
    return 0


def steps(length: int, cluster: Cluster) -> dict[str, Step]:
    """Make what is timed: the layer under one plan for each way."""
    torch.manual_seed(0)
    model, batch = Layer(), {"x": torch.randn(1, length, WIDTH)}
    plan = Plan.context_parallel(range(WORLD))
    found: dict[str, Step] = {}
    for way in WAYS:
        asked = replace(plan, attention=way)
        made = hetu_fx.auto_parallelize(copy.deepcopy(model), batch, plan=asked, cluster=cluster, data="global")
        found[way] = partial(_step, made, batch)
    return found


def _step(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    model(**batch).backward()


if __name__ == "__main__":
    sys.exit(main())
