"""Decides what an emulation will do: a plan of folders, settings, commands and ranks, as one value."""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hetu_fx.errors import EnvironmentProblem
from hetu_fx_emulate.cleanup import run_name
from hetu_fx_emulate.limits import (
    Affinity,
    CgroupV1,
    CgroupV2,
    Limiter,
    Setting,
    assign_cores,
    cgroup_bases,
    controller_settings,
    memory_settings,
    num_cores,
    rank_folders,
    shared_speeds,
    speed_settings,
    this_limiter,
)
from hetu_fx_emulate.network import INTERFACE, Command, address, check_tools, namespace, network_commands
from hetu_fx_emulate.spec import EmulateSpec, check_cores

SPEEDS_VARIABLE = "HETU_FX_EMULATED_SPEEDS"
MEMORY_VARIABLE = "HETU_FX_EMULATED_MEMORY"
DEFAULT_PORT = 29500
KEPT_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),  # the most that glibc takes
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""A device keeps memory that it has had, as an accelerator's allocator does: by glibc's own thresholds ranks give it
back and fault it in again as the sizes of their batches have it, and a fault in a virtual machine takes 7 us."""
CANNOT_START_STATUS = 125

_serials = itertools.count()


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank: its environment, the cgroups it joins, its network namespace, the core it is pinned to."""

    rank: int
    environment: tuple[tuple[str, str], ...]
    joins: tuple[Path, ...]
    namespace: str | None
    core: int | None

    def argv(self, command: Sequence[str]) -> tuple[str, ...]:
        """Return what starts the command in its cgroups and namespace, without a process in between."""
        inside = () if self.namespace is None else ("nsenter", f"--net=/run/netns/{self.namespace}")
        if not self.joins:
            return (*inside, *command)
        files = " ".join(shlex.quote(str(folder / "cgroup.procs")) for folder in self.joins)
        script = f'for f in {files}; do echo $$ > "$f" || exit {CANNOT_START_STATUS}; done; exec "$@"'
        return ("sh", "-c", script, "hetu-fx-rank", *inside, *command)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything a run will do, decided before anything is touched."""

    name: str
    spec: EmulateSpec
    limiter: Limiter
    folders: tuple[Path, ...]
    settings: tuple[Setting, ...]
    network: tuple[Command, ...]
    ranks: tuple[RankPlan, ...]

    def lines(self, command: Sequence[str]) -> Iterator[str]:
        """Yield the run as shell commands and comments, in the order in which it happens."""
        yield f"# {describe(self)}"
        for folder in self.folders:
            yield f"mkdir {folder}"
        for setting in self.settings:
            yield f"echo {setting.text} > {setting.path}" + ("  # where it exists" if setting.optional else "")
        for step in self.network:
            yield shlex.join(step)
        for rank in self.ranks:
            pin = () if rank.core is None else ("taskset", "-c", str(rank.core))
            variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in rank.environment)
            yield f"env {variables} {shlex.join((*pin, *rank.argv(command)))} &"


LimitChoice = Literal["auto", "cgroups", "affinity"]


def plan_run(spec: EmulateSpec, *, limit: LimitChoice = "auto", port: int = DEFAULT_PORT) -> RunPlan:
    """Decide what a run will do. Touches nothing.

    Raises EnvironmentProblem when the speeds do not fit the cores, or when the machine lacks what they need.
    """
    limiter = _limiter(limit, spec)
    if not isinstance(limiter, Affinity):
        check_cores(spec.speeds, num_cores(limiter))
    if spec.num_nodes > 1:
        _check_nodes_possible()
    name = run_name(next(_serials))
    ranks = range(spec.world_size)
    runs = tuple(base / name for base in cgroup_bases(limiter))
    return RunPlan(
        name=name,
        spec=spec,
        limiter=limiter,
        folders=(*runs, *(folder for rank in ranks for folder in rank_folders(limiter, name, rank))),
        settings=_settings(limiter, name, spec),
        network=network_commands(name, spec),
        ranks=_rank_plans(limiter, name, spec, port),
    )


def describe(plan: RunPlan) -> str:
    """Say in one line what is emulated, and how."""
    spec = plan.spec
    speeds = ", ".join(f"{speed:g}" for speed in spec.speeds)
    parts = [f"{spec.world_size} ranks of {speeds} cores"]
    if any(spec.memory):
        parts.append("memory " + ", ".join(size_text(size) for size in spec.memory))
    if spec.num_nodes > 1:
        parts.append(f"{spec.num_nodes} nodes")
    if spec.link_bits_per_second is not None:
        parts.append(f"links of {spec.link_bits_per_second / 1e6:g} Mbit/s")
    return "; ".join((*parts, _how(plan)))


def _limiter(limit: LimitChoice, spec: EmulateSpec) -> Limiter:
    if limit == "affinity":
        return Affinity("asked for")
    limiter = this_limiter()
    if isinstance(limiter, CgroupV1) and not any(spec.memory):
        limiter = replace(limiter, memory=None)
    if limit == "cgroups" and isinstance(limiter, Affinity):
        raise EnvironmentProblem(f"no CPU quotas to be had: {limiter.reason}\nhint: run as root")
    return limiter


def _check_nodes_possible() -> None:
    if os.geteuid() != 0:
        raise EnvironmentProblem(
            "--nodes makes network namespaces, which needs root\nhint: run as root or with one node"
        )
    check_tools()


def _settings(limiter: Limiter, name: str, spec: EmulateSpec) -> tuple[Setting, ...]:
    settings = list(controller_settings(limiter, name, spec))
    for rank, (speed, size) in enumerate(zip(spec.speeds, spec.memory, strict=True)):
        settings += speed_settings(limiter, name, rank, speed)
        settings += memory_settings(limiter, name, rank, size)
    return tuple(settings)


def _rank_plans(limiter: Limiter, name: str, spec: EmulateSpec, port: int) -> tuple[RankPlan, ...]:
    cores: tuple[int | None, ...] = (None,) * spec.world_size
    if isinstance(limiter, Affinity):
        cores = assign_cores(spec.speeds, tuple(os.sched_getaffinity(0)))
    return tuple(
        RankPlan(
            rank=rank,
            environment=tuple(_environment(spec, rank, port).items()),
            joins=rank_folders(limiter, name, rank),
            namespace=namespace(name, spec.node_of(rank)) if spec.num_nodes > 1 else None,
            core=cores[rank],
        )
        for rank in range(spec.world_size)
    )


def rank_variables(spec: EmulateSpec, rank: int, port: int, *, on_nodes: bool) -> dict[str, str]:
    """Make the variables that a launcher gives a rank, which is in its node's network (`on_nodes`) or in the host's."""
    node = spec.node_of(rank)
    peers = spec.ranks_of(node)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": peers.index(rank),
        "WORLD_SIZE": spec.world_size,
        "LOCAL_WORLD_SIZE": len(peers),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": spec.num_nodes,
        "HETU_FX_NODE": f"node{node}",
        "MASTER_ADDR": address(0) if on_nodes else "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": INTERFACE if on_nodes else "lo",
    }
    return {name: str(value) for name, value in variables.items()}


def _environment(spec: EmulateSpec, rank: int, port: int) -> dict[str, str]:
    """Make the variables of a launcher and of a device. Threads beyond its cores would only fight for its quota."""
    variables = rank_variables(spec, rank, port, on_nodes=spec.num_nodes > 1)
    variables["PYTHONUNBUFFERED"] = "1"
    variables[SPEEDS_VARIABLE] = ",".join(f"{speed:g}" for speed in spec.speeds)
    if any(spec.memory):
        variables[MEMORY_VARIABLE] = ",".join("-" if size is None else str(size) for size in spec.memory)
    threads = str(max(1, math.floor(spec.speeds[rank])))
    variables |= {f"{library}_NUM_THREADS": threads for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
    return variables | KEPT_MEMORY


def _how(plan: RunPlan) -> str:
    match plan.limiter:
        case CgroupV1() | CgroupV2():
            return "by CPU quotas"
        case Affinity(reason):
            cores = tuple(rank.core for rank in plan.ranks if rank.core is not None)
            speeds = ", ".join(f"{speed:.2g}" for speed in shared_speeds(cores))
            return f"by CPU affinity ({reason}), so the speeds are about {speeds} cores when all are busy"


def size_text(size: int | None) -> str:
    return "no limit" if size is None else f"{size / (1 << 20):g} MiB"
