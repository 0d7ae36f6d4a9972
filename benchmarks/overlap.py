"""`python -m benchmarks.overlap`: tensor parallel steps with products beside their communication, and without.

Two processes on a core each share every layer of a Llama, over links of several speeds: on one of them a sum travels
for about as long as the product before it takes. Devices and links are measured first, so that slices are chosen by the
prices that users have. In turns run: one after the other, as a graph is without the pass; only the backward's sums
beside gradients of weights; and that with slices too. Without a link, ranks read each other's memory.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

import hetu_fx
from benchmarks.equal import contest
from benchmarks.equal.contest import Against, Contest, Job, kept_by, marked_step
from benchmarks.kit.contest import adamw
from benchmarks.kit.fleet import in_fleet, measured_devices, run_workers, say, worker_parser, write_result
from benchmarks.kit.models import Size, batch, llama
from benchmarks.kit.report import Bar, finish
from benchmarks.kit.smallest import few
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.switching.step import compiled_plans
from hetu_fx.transforms.lowering.overlap_products import Overlap
from hetu_fx.transforms.specialize.device_graph import DeviceGraph
from hetu_fx_emulate.emulate import EmulateSpec

SIZE = Size(width=1024, layers=1, rows=16, tokens=128)
WITHOUT, BACKWARD, SLICES = "one after the other", "backward beside", "and slices"
SPEEDS = (0.95, 0.95)
ROUNDS, QUICK_ROUNDS = 15, 5
MEASURE_SECONDS = 1.0
NO_LINK = 0
BARS = {400: 0.90, 1200: 0.97, NO_LINK: 1.03}
"""Of links in Mbit/s, what a step with slices may take over one without."""
MEMORY_BAR = 1.02


def main() -> int:
    """Run the links and judge them; or be a process of one."""
    made = worker_parser("overlap", "Tensor parallel steps with products beside their communication, and without.")
    made.add_argument("--link-megabits", type=int, metavar="N", help="only a link of N Mbit/s; 0: one machine")
    options = made.parse_args()
    if options.worker is not None:
        return work(options.worker, options.link_megabits, quick=options.quick)
    bars, rows = [], []
    for link in few(BARS) if options.link_megabits is None else [options.link_megabits]:
        given = ["--link-megabits", str(link), *["--quick"] * options.quick]
        told = run_workers("overlap", given, _spec(link), timeout_seconds=900, limit="cgroups")
        bars += told["bars"]
        rows += told["rows"]
    return finish("overlap", [Bar(**bar) for bar in bars], rows)


def _spec(link: int) -> EmulateSpec:
    if link == NO_LINK:
        return EmulateSpec(speeds=SPEEDS)
    return EmulateSpec(speeds=SPEEDS, num_nodes=2, link_bits_per_second=link * 10**6)


def work(result: Path, link: int, *, quick: bool) -> int:
    """Be one process."""
    with in_fleet():
        cluster = measured_devices(GroupTable(), seconds=MEASURE_SECONDS)
        say(str(cluster))
        makers = {name: partial(job, name, cluster) for name in (WITHOUT, BACKWARD, SLICES)}
        asked = Contest(makers, [Against((SLICES,), WITHOUT, BARS.get(link, 1.03), MEMORY_BAR)])
        found = contest.run(asked, rounds=QUICK_ROUNDS if quick else ROUNDS)
        setting = f"{link} Mbit/s" if link else "one machine"
        bars = [asdict(bar) for bar in found.bars(setting, asked)]
        write_result(result, {"bars": bars, "rows": found.rows(setting, asked)})
    return 0


def job(name: str, cluster: Cluster) -> Job:
    """Train by hetu_fx, with the pass as it is asked for."""
    plain, rows = llama(SIZE), batch(SIZE.rows, SIZE.tokens)
    optimizer = adamw(plain)
    with patch.object(compiled_plans, "Overlap", PASSES[name]):
        model = hetu_fx.auto_parallelize(
            plain,
            dict(rows),
            plan=hetu_fx.Plan.tensor_parallel(range(dist.get_world_size())),
            cluster=cluster,
            optimizer=optimizer,
            data="global",
            options=hetu_fx.Options(health={"patience": 10**6}),  # the plan is to stay, whatever it takes
        )
        step = marked_step(model, optimizer, rows)
        step()
    return Job(step, partial(kept_by, model, optimizer))


@dataclass(frozen=True)
class Without(Overlap):
    """Leaves a graph as it is."""

    def __call__(self, device: DeviceGraph) -> DeviceGraph:
        return device


@dataclass(frozen=True)
class InBackward(Overlap):
    """Makes no slices."""

    def __call__(self, device: DeviceGraph) -> DeviceGraph:
        return Overlap(self.annotated)(device)


PASSES = {WITHOUT: Without, BACKWARD: InBackward, SLICES: Overlap}

if __name__ == "__main__":
    sys.exit(main())
