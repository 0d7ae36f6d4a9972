"""One rank of the reshard benchmark: makes the contestants of every case, and times them in turns."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from benchmarks.cases.reshard import ACROSS, Case, one_node
from benchmarks.kit.contest import Step, barrier, run_rounds
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.comm_ops.resolve.resolution import OpCall
from hetu_fx.comm_ops.wire.groups import GroupTable, using

RESOLVED, FLAT, LEVELS, PADDED = "resolved", "flat", "two levels", "padded"
GATHERED, DTENSOR = "gather then slice", "DTensor"
_PLACEMENTS: dict[str, Placement] = {"S(0)": Shard(0), "S(1)": Shard(1), "R": Replicate(), "P": Partial()}


def work(result: Path, *, nodes: int, shape: tuple[int, int], rounds: int) -> int:
    """Be one rank: time every case, and let rank 0 write {case: {who: {seconds, link bytes}}}."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.set_num_threads(1)
    table = GroupTable()
    with using(table), torch.no_grad():
        cluster = Cluster.measure(table, seconds=0.2) if nodes > 1 else None
        mesh = init_device_mesh("cpu", (table.size,))
        cases = ACROSS if nodes > 1 else one_node(table.size)
        times = {case.name: measure(case, shape, cluster, mesh, rounds) for case in cases}
    if table.rank == 0:
        link = None if cluster is None else asdict(cluster.inter)
        result.write_text(json.dumps({"cases": times, "link": link}))
    barrier()
    dist.destroy_process_group()
    return 0


def measure(
    case: Case, shape: tuple[int, int], cluster: Cluster | None, mesh: DeviceMesh, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Time the contestants of one case; bytes are those that leave the nodes in a step."""
    steps = contestants(case, shape, cluster, mesh)
    seconds = run_rounds(steps, rounds=rounds, warm_up=1)
    return {who: {"seconds": seconds[who], "link bytes": [link_bytes(step)]} for who, step in steps.items()}


def contestants(case: Case, shape: tuple[int, int], cluster: Cluster | None, mesh: DeviceMesh) -> dict[str, Step]:
    """Make the ways that are compared."""
    rank, resolution = dist.get_rank(), case.resolution(shape)
    x = torch.ones(resolution.source.local_shape(rank, shape)) if resolution.source.holds(rank) else torch.empty(0, 0)
    gathered = [call for part in case.by_gathering(shape) for call in part.calls(rank)]
    flat = resolution.calls(rank)
    ways = {RESOLVED: tuple(map(Lowering(cluster).with_algorithm, flat))}
    if cluster is None:
        ways[GATHERED] = tuple(gathered)
    else:
        ways[FLAT] = flat
        ways[LEVELS] = tuple(map(Lowering(cluster, "two_level").with_algorithm, flat))
        padded = tuple(map(Lowering(cluster, "padded").with_algorithm, flat))
        if padded != flat and not case.is_moved(shape):
            ways[PADDED] = padded
    steps: dict[str, Step] = {who: partial(run_calls, calls, x) for who, calls in ways.items()}
    if case.placements is not None:
        source, target = (_PLACEMENTS[name] for name in case.placements)
        steps[DTENSOR] = partial(_redistribute, DTensor.from_local(x, mesh, [source], run_check=False), mesh, target)
    return steps


def run_calls(calls: Sequence[OpCall], x: Tensor) -> None:
    """Make a rank's calls."""
    for call in calls:
        x = getattr(torch.ops.hetu, call.op)(x, *call.args)


def _redistribute(x: DTensor, mesh: DeviceMesh, target: Placement) -> None:
    x.redistribute(mesh, [target]).to_local()


def link_bytes(step: Step) -> float:
    """Count the bytes that leave all nodes in one step, headers included, once per node."""
    barrier()
    before = _sent()
    step()
    barrier()
    sent = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    # The ranks of a node share its interface, so that the second of each does not count.
    sent[dist.get_rank()] = _sent() - before if dist.get_rank() % 2 == 0 else 0.0
    dist.all_reduce(sent)
    return sent.sum().item()


def _sent() -> float:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    found = [re.split(r"[:\s]+", line.strip()) for line in lines if line.strip().startswith("eth0:")]
    return float(found[0][9]) if found else 0.0
