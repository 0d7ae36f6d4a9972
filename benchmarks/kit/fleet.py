"""Processes that a benchmark starts on emulated devices, and what they do alike.

A benchmark runs itself on every device (`--worker FILE`); rank 0 writes what was found to the file.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.kit.contest import adamw, barrier, loss_of, slowest, timed, train_step
from benchmarks.kit.forks import Tell, in_forks
from benchmarks.kit.report import parser
from benchmarks.kit.smallest import ROUNDS, SECONDS, is_smallest, least
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.links import groups_to_time, time_collectives
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.planner.price.stage_seconds import stage_costs
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from hetu_fx_emulate.emulate import EmulateSpec, change_speed, current_speeds, run
from hetu_fx_emulate.emulation_plan import rank_variables

MakeModel = Callable[[], nn.Module]
Batch = Mapping[str, Tensor]
SECONDS_OF_FORKS = 1800.0


def worker_parser(name: str, purpose: str) -> argparse.ArgumentParser:
    """Make the parser of a benchmark that runs itself on every device."""
    made = parser(name, purpose)
    made.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return made


def run_workers(name: str, arguments: Sequence[str], spec: EmulateSpec, **how: Any) -> Any:
    """Run the benchmark on every device; give what rank 0 wrote. Ends this process where a worker fails.

    `how` is for `emulate.run`: timeout_seconds, limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        given = ["--worker", str(result), *arguments]
        if is_smallest():
            run_in_forks(name, given, spec)
            return json.loads(result.read_text())
        status = run(spec, [sys.executable, "-m", f"benchmarks.{name}", *given], **how)
        if status != 0:
            sys.exit(status)
        return json.loads(result.read_text())


def run_in_forks(name: str, arguments: Sequence[str], spec: EmulateSpec) -> None:
    """Run the ranks of the smallest case as forks of this process, which has imported what they need.

    No speed, memory or link is limited: they are on one machine, and know of nodes by their environment alone. Each
    captures equal models once, as in tests.
    """
    port, job = _free_port(), partial(_be_rank, name, ("--smoke", *arguments))
    environments = [rank_variables(spec, rank, port, on_nodes=False) for rank in range(spec.world_size)]
    for environment, heard in in_forks(environments, job, len(environments), SECONDS_OF_FORKS):
        if heard != [0]:
            raise RuntimeError(f"rank {environment['RANK']} of {name}: {heard or 'died, or did not end'}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _be_rank(name: str, arguments: Sequence[str], environment: Mapping[str, str], tell: Tell) -> None:
    from tests.ranks.remembered import remembered_captures  # what is measured is installed without tests

    os.environ |= environment
    sys.argv = [f"benchmarks.{name}", *arguments]
    try:
        module = import_module(f"benchmarks.{name}")
        with remembered_captures():
            tell((module if hasattr(module, "main") else import_module(f"benchmarks.{name}.__main__")).main())
    except BaseException:
        tell(traceback.format_exc())


@contextmanager
def in_fleet() -> Iterator[None]:
    """Be one rank meanwhile; one that is alone has no process group."""
    if world_here() > 1:
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    yield
    barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_here() -> int:
    """Return the number of this process among those that were started."""
    return int(os.environ["RANK"])


def world_here() -> int:
    """Return how many processes were started."""
    return int(os.environ["WORLD_SIZE"])


def write_result(path: Path, value: object) -> None:
    """Give a value to the process that started the workers: rank 0's."""
    if rank_here() == 0:
        path.write_text(json.dumps(value))


def say(text: str) -> None:
    """Tell how far it is, once."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def set_speeds(speeds: Sequence[float]) -> None:
    """Give every device its speed; collective. Those that become slower go first, so that all fit the cores."""
    barrier()
    if dist.get_rank() == 0 and not is_smallest():
        before = current_speeds()
        for rank in sorted(range(len(speeds)), key=lambda rank: speeds[rank] - before[rank]):
            change_speed(rank, speeds[rank])
    barrier()


def compute_gradients(model: nn.Module, rows: Batch) -> None:
    """Run a plain model forward and backward."""
    model.zero_grad()
    loss_of(model, rows).backward()


class OwnSpeeds:
    """Runs a model on every device, all at once and without communication, to tell its speed for this model.

    `small` is a batch of a few rows, of the length that `costs` are for.
    """

    def __init__(self, costs: ProgramCosts, make: MakeModel, small: Batch) -> None:
        self._costs, self._model, self._small = costs, make(), small
        self._compute()

    def _compute(self) -> None:
        compute_gradients(self._model, self._small)

    def seconds(self, rounds: int) -> list[float]:
        """Return the seconds of so many rounds; the devices begin together."""
        barrier()
        return [timed(self._compute) for _ in range(least(rounds, ROUNDS))]

    def cluster(self, cluster: Cluster, seconds: Sequence[float]) -> Cluster:
        """Return the cluster with the speeds at which devices take the median of what each measured; collective."""
        rank, rows = dist.get_rank(), len(next(iter(self._small.values())))
        (stage_cost,) = stage_costs(Plan.single(rank).parts(self._costs.num_blocks)[0], self._costs, cluster)
        factor = stage_cost.slowest_compute(rows) / statistics.median(seconds)
        factors = all_gather_object(GroupTable(), factor)
        return cluster.with_speeds({d.rank: d.flops_per_second * factors[d.rank] for d in cluster.devices})


def measured_cluster(
    table: GroupTable, costs: ProgramCosts, make: MakeModel, small: Batch, *, seconds: float, rounds: int
) -> Cluster:
    """Measure the devices for so long, and their speed by so many rounds of the model itself; collective."""
    cluster, own = measured_devices(table, seconds=seconds), OwnSpeeds(costs, make, small)
    return own.cluster(cluster, own.seconds(rounds))


def measured_devices(table: GroupTable, *, seconds: float, device: str = "cpu") -> Cluster:
    """Measure the devices for so long, and collectives as `hetu-fx measure` does; collective."""
    cluster = Cluster.measure(table, seconds=SECONDS if is_smallest() else seconds, device=device)
    return replace(
        cluster, collectives=time_collectives(table, groups_to_time(cluster.groups, cluster.devices), device)
    )


class Alone:
    """A plain model that every device trains by itself, all at once: how fast each really is.

    Args:
        model: the same on all devices.
        small: a batch of a few rows.
        budget_seconds: how long a run takes at least, so that those that are fast stay busy beside those that are slow.
    """

    def __init__(self, model: nn.Module, small: Batch, budget_seconds: float) -> None:
        self._model, self._small, self._budget_seconds = model, small, budget_seconds
        self._seconds: list[float] = []

    def run(self) -> None:
        """Compute gradients again and again; remember what that took on average. Collective."""
        barrier()
        start, elapsed, count = perf_counter(), 0.0, 0
        while elapsed < (SECONDS if is_smallest() else self._budget_seconds):
            compute_gradients(self._model, self._small)
            elapsed, count = perf_counter() - start, count + 1
        self._seconds.append(elapsed / count)
        barrier()  # or what follows waits for the slowest

    def taken(self) -> list[float]:
        """Return what each device took in the median of the runs since the last call; collective."""
        seconds = all_gather_object(GroupTable(), statistics.median(self._seconds))
        self._seconds.clear()
        return seconds


@dataclass(frozen=True)
class Training:
    """A parallel model in training at the speeds that are to be timed."""

    model: Any
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]


def parallel(plan: Plan, plain: nn.Module, whole: Batch) -> Training:
    """Make a model, which is where this rank computes, parallel; collective."""
    import hetu_fx

    optimizer = adamw(plain)
    model = hetu_fx.auto_parallelize(plain, dict(whole), plan=plan, optimizer=optimizer, data="global")
    return Training(model, optimizer, train_step(model, optimizer, whole))


def training(plan: Plan, make: MakeModel, whole: Batch, *, equal: Sequence[float], speeds: Sequence[float]) -> Training:
    """Make the model while devices have `equal` speeds, and warm it up at `speeds`; collective."""
    set_speeds(equal)
    made = parallel(plan, make(), whole)
    made.step()
    set_speeds(speeds)
    made.step()
    return made


def measured_seconds(
    plan: Plan, make: MakeModel, whole: Batch, *, rounds: int, equal: Sequence[float], speeds: Sequence[float]
) -> list[float]:
    """Return the times of steps until the last rank is done; collective.

    The model is made while devices have `equal` speeds, and timed at `speeds`.
    """
    made = training(plan, make, whole, equal=equal, speeds=speeds)
    return [slowest(timed(made.step)) for _ in range(least(rounds, ROUNDS))]
