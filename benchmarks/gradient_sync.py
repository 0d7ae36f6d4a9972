"""Gradient sync and parameter gather of four replicas on two emulated nodes with a slow link: flat, and in two levels.

Bytes that cross the link are counted at the interface, and compared with the least: whoever sums or gathers over two
nodes must send each of them what it lacks.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kit.contest import Step, barrier, run_rounds
from benchmarks.kit.fleet import run_workers, worker_parser
from benchmarks.kit.report import Bar, Row, finish, median_ratio
from benchmarks.workers.reshard import link_bytes
from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.plans.homes import make_home_layouts
from hetu_fx.switching.bridge.bridge import Bridge, BridgeEntry
from hetu_fx_emulate.emulate import EmulateSpec

WORLD, NODES, LINK_BITS_PER_SECOND = 4, 2, 100e6
SHAPE, BUCKET_BYTES = (256, 1024), 2 << 20
GRADIENTS, HOME_GRADIENTS, PARAMETERS = "gradients, copies at home", "gradients, a part at home", "parameters"
# Turns between the two nodes that each must make; in one turn each node sends the other half of the bytes.
TURNS = {GRADIENTS: 2, HOME_GRADIENTS: 1, PARAMETERS: 1}
CHOICES = ("flat", "two_level", "auto")
SPEEDUP_BAR, BYTES_BAR = 1.2, 1.1
Times = Mapping[str, Mapping[str, Mapping[str, list[float]]]]


def main() -> int:
    """Run under the emulator and judge."""
    made = worker_parser("gradient_sync", "Gradient sync over a slow link between nodes.")
    options = made.parse_args()
    parameters, rounds = (4, 3) if options.quick else (8, 7)
    if options.worker is not None:
        return work(options.worker, parameters, rounds)
    spec = EmulateSpec(speeds=(0.4,) * WORLD, num_nodes=NODES, link_bits_per_second=LINK_BITS_PER_SECOND)
    return judge(run_workers("gradient_sync", ["--quick"] * options.quick, spec, timeout_seconds=600), parameters)


def judge(times: Times, parameters: int) -> int:
    """Turn seconds and bytes into bars and rows."""
    total = parameters * SHAPE[0] * SHAPE[1] * 4
    bars, rows = [], []
    for case, turns in TURNS.items():
        found, least = times[case], turns * total
        speedup = median_ratio(found["flat"]["seconds"], found["two_level"]["seconds"])
        bars.append(Bar(f"two levels over flat, {case}", speedup, SPEEDUP_BAR, at_least=True))
        excess = found["auto"]["link bytes"][0] / least
        bars.append(Bar(f"link bytes of the chosen form over the least, {case}", excess, BYTES_BAR, at_least=False))
        rows.append(row(case, found, least))
    return finish("gradient_sync", bars, rows, bytes=total, link_bits_per_second=LINK_BITS_PER_SECOND)


def row(case: str, found: Mapping[str, Mapping[str, list[float]]], least: float) -> Row:
    """Make a line of the table."""
    seconds = {f"{who}, ms": statistics.median(found[who]["seconds"]) * 1e3 for who in CHOICES}
    crossed = {f"{who}, link MB": found[who]["link bytes"][0] / 1e6 for who in CHOICES}
    return {"what": case, **seconds, **crossed, "least link MB": least / 1e6}


def work(result: Path, parameters: int, rounds: int) -> int:
    """Be one rank: time every case, and let rank 0 write {case: {choice: {seconds, link bytes}}}."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.set_num_threads(1)
    table = GroupTable()
    with using(table):
        cluster = Cluster.measure(table, seconds=0.2)
    contestants = {choice: steps(table, Lowering(cluster, choice), parameters) for choice in CHOICES}
    times: dict[str, Any] = {}
    for case in TURNS:
        ways = {choice: contestants[choice][case] for choice in CHOICES}
        seconds = run_rounds(ways, rounds=rounds, warm_up=1)
        times[case] = {who: {"seconds": seconds[who], "link bytes": [link_bytes(way)]} for who, way in ways.items()}
    if table.rank == 0:
        result.write_text(json.dumps(times))
    barrier()
    dist.destroy_process_group()
    return 0


def steps(table: GroupTable, lowering: Lowering, parameters: int) -> dict[str, Step]:
    """Make what is timed, in the forms of one lowering."""
    whole, parts = (bridge(table, lowering, parameters, zero) for zero in (0, 1))
    gradients = {entry.name: torch.ones(SHAPE) for entry in whole.plan.entries}
    homes = parts.reduce(gradients)
    return {
        GRADIENTS: partial(_reduce, whole, gradients),
        HOME_GRADIENTS: partial(_reduce, parts, gradients),
        PARAMETERS: partial(_gather, parts, homes),
    }


def bridge(table: GroupTable, lowering: Lowering, parameters: int, zero: int) -> Bridge:
    """Make the bridge of replicas that each have all parameters."""
    ranks = range(WORLD)
    copies, summands = Annotation.on(ranks, Duplicate(WORLD)), Annotation.on(ranks, Partial(WORLD))
    names = [f"weight {number}" for number in range(parameters)]
    homes = make_home_layouts(dict.fromkeys(names, SHAPE), dict.fromkeys(names, copies), [1.0] * len(ranks), zero)
    entries = [BridgeEntry(name, SHAPE, torch.float32, homes[name], copies, summands) for name in names]
    return Bridge(entries, table, BUCKET_BYTES, lowering)


def _reduce(way: Bridge, gradients: Mapping[str, Tensor]) -> None:
    way.reduce(gradients)


def _gather(way: Bridge, homes: Mapping[str, Tensor]) -> None:
    way.gather(homes)


if __name__ == "__main__":
    sys.exit(main())
