"""How a rank gets its share of the machine: CPU quotas and memory limits of cgroups, or CPU affinity.

Decides only: the values here are paths and texts, and nothing changes until emulate.run writes them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from hetu_fx.base.cgroups import cgroup_quota, count_memory_kills, v1_folder, v2_root
from hetu_fx.errors import EnvironmentProblem
from hetu_fx_emulate.spec import EmulateSpec

# Short, so that a rank that waits for another waits little; the kernel accepts quotas from 1 ms on.
PERIOD_US = 10_000
QUOTA_MIN_US = 1_000


@dataclass(frozen=True, slots=True)
class CgroupV1:
    """The folders of the cpu and memory hierarchies under which a run makes its own."""

    cpu: Path
    memory: Path | None


@dataclass(frozen=True, slots=True)
class CgroupV2:
    """The folder of the one hierarchy under which a run makes its own."""

    base: Path


@dataclass(frozen=True, slots=True)
class Affinity:
    """No quotas: slow ranks share a core. `reason` says why."""

    reason: str


Limiter = CgroupV1 | CgroupV2 | Affinity


@dataclass(frozen=True, slots=True)
class Setting:
    """A text for a file of a cgroup. An optional one is left out where the kernel lacks the file."""

    path: Path
    text: str
    optional: bool = False

    def write(self) -> None:
        """Write it; raises EnvironmentProblem where the kernel refuses."""
        if self.optional and not self.path.exists():
            return
        try:
            self.path.write_text(self.text)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot write {self.text!r} to {self.path} ({error.strerror})\n"
                "hint: run as root, outside of an unprivileged container, or use affinity (--limit affinity)"
            ) from error


def find_limiter(mounts: str, own: str, *, user: str = "") -> Limiter:
    """Choose what this machine offers.

    mounts: the text of /proc/self/mounts; own: the text of /proc/self/cgroup.
    """
    cpu, memory = v1_folder(mounts, own, "cpu"), v1_folder(mounts, own, "memory")
    if cpu is not None:
        return CgroupV1(cpu, memory) if os.access(cpu, os.W_OK) else Affinity(f"{cpu} is not writable{user}")
    base = v2_root(mounts)
    if base is None:
        return Affinity("no cgroup hierarchy with CPU quotas is mounted")
    if not os.access(base, os.W_OK):
        return Affinity(f"{base} is not writable{user}")
    if "cpu" not in (base / "cgroup.controllers").read_text().split():
        return Affinity(f"{base} has no cpu controller")
    return CgroupV2(base)


def this_limiter() -> Limiter:
    """Choose what this machine offers to this process."""
    user = "" if os.geteuid() == 0 else " by an ordinary user"
    return find_limiter(Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text(), user=user)


def cgroup_bases(limiter: Limiter) -> tuple[Path, ...]:
    """List the folders that hold the runs' folders."""
    match limiter:
        case CgroupV1(cpu, memory):
            return (cpu,) if memory is None else (cpu, memory)
        case CgroupV2(base):
            return (base,)
        case Affinity():
            return ()
        case _:
            assert_never(limiter)


def num_cores(limiter: Limiter) -> float:
    """Count the cores this process may use: its affinity, and the quota it is under."""
    cores = float(len(os.sched_getaffinity(0)))
    folder = next(iter(cgroup_bases(limiter)), None)
    quota = None if folder is None else cgroup_quota(folder)
    return cores if quota is None else min(cores, quota)


def quota_and_period(speed: float) -> tuple[int, int]:
    """Return the microseconds of CPU time, and the period they are for, that make `speed` cores."""
    if speed * PERIOD_US >= QUOTA_MIN_US:
        return round(speed * PERIOD_US), PERIOD_US
    return QUOTA_MIN_US, math.floor(QUOTA_MIN_US / speed)


# By kind: files of a rank's cgroup and what stands in them; of memory the second keeps it out of swap.
_SPEED_FILES: Mapping[type[Limiter], Mapping[str, str]] = {
    CgroupV1: {"cpu.cfs_period_us": "{period}", "cpu.cfs_quota_us": "{quota}"},
    CgroupV2: {"cpu.max": "{quota} {period}"},
    Affinity: {},
}
_MEMORY_FILES: Mapping[type[Limiter], Mapping[str, str]] = {
    CgroupV1: {"memory.limit_in_bytes": "{size}", "memory.memsw.limit_in_bytes": "{size}"},
    CgroupV2: {"memory.max": "{size}", "memory.swap.max": "0"},
}


def speed_settings(limiter: Limiter, name: str, rank: int, speed: float) -> tuple[Setting, ...]:
    """List what gives `rank` of the run `name` its speed; also what changes it while it runs."""
    quota, period = quota_and_period(speed)
    files, folders = _SPEED_FILES[type(limiter)], rank_folders(limiter, name, rank)
    return tuple(Setting(folders[0] / file, text.format(quota=quota, period=period)) for file, text in files.items())


def memory_settings(limiter: Limiter, name: str, rank: int, size: int | None) -> tuple[Setting, ...]:
    """List what limits the memory of `rank`."""
    if size is None:
        return ()
    if isinstance(limiter, Affinity) or (isinstance(limiter, CgroupV1) and limiter.memory is None):
        raise EnvironmentProblem(
            f"cannot limit rank {rank} to {size} bytes: memory limits need a writable memory cgroup\n"
            "hint: run as root, or leave --memory out"
        )
    folder = rank_folders(limiter, name, rank)[-1]
    (limit, text), (swap, of_swap) = _MEMORY_FILES[type(limiter)].items()
    return (
        Setting(folder / limit, text.format(size=size)),
        Setting(folder / swap, of_swap.format(size=size), optional=True),
    )


def controller_settings(limiter: Limiter, name: str, spec: EmulateSpec) -> tuple[Setting, ...]:
    """List what hands the controllers down to the ranks' folders; only version 2 wants that."""
    if not isinstance(limiter, CgroupV2):
        return ()
    wanted = "+cpu +memory" if any(spec.memory) else "+cpu"
    base = limiter.base
    return tuple(Setting(folder / "cgroup.subtree_control", wanted) for folder in (base, base / name))


def rank_folders(limiter: Limiter, name: str, rank: int) -> tuple[Path, ...]:
    """List the cgroups that `rank` runs in."""
    return tuple(base / name / f"rank{rank}" for base in cgroup_bases(limiter))


def num_memory_kills(limiter: Limiter, name: str, rank: int) -> int:
    """Count the processes of `rank` that the kernel killed for memory."""
    return sum(map(count_memory_kills, rank_folders(limiter, name, rank)))


def assign_cores(speeds: tuple[float, ...], cores: tuple[int, ...]) -> tuple[int, ...]:
    """Give each rank a core so that slow ranks share one: the unequal devices of those without quotas.

    Uses as many cores as the fastest rank would need if all had the same, so spare cores stay idle.
    """
    wanted = math.ceil(sum(speeds) / max(speeds) - 1e-9)
    load = {core: 0.0 for core in sorted(cores)[:wanted]}
    chosen: dict[int, int] = {}
    for rank in sorted(range(len(speeds)), key=lambda rank: -speeds[rank]):
        chosen[rank] = min(load, key=lambda core: load[core])
        load[chosen[rank]] += speeds[rank]
    return tuple(chosen[rank] for rank in range(len(speeds)))


def shared_speeds(assigned: tuple[int, ...]) -> tuple[float, ...]:
    """Return the speed each rank has when all are busy on their assigned cores."""
    return tuple(1 / assigned.count(core) for core in assigned)
