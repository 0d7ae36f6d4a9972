"""A device's host: its name, the memory that it leaves a process, and what a step takes on it besides its work.

Ranks agree on a batch, parameters and gradients go through hooks, results are handed out: thousands of calls that are
short on a fast host and long on a slow one, whatever the model. They are told by as many small ops.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from hetu_fx.base.cgroups import memory_left_within, memory_limits_within, read_text_file
from hetu_fx.base.device_types import device_type_record
from hetu_fx.base.machine import node_name as node_name


def memory_limits(device: str, root: Path = Path("/")) -> tuple[tuple[str, int], ...]:
    """Return every limit on this rank's memory as (name of what is limited, bytes)."""
    place = torch.device(device)
    if (memory := device_type_record(place).memory) is not None:
        own = memory(place)
        return ((own.name, own.total_bytes),)
    mounts, groups = read_text_file(root / "proc/self/mounts"), read_text_file(root / "proc/self/cgroup")
    return (("machine", _machine_bytes(root)), *memory_limits_within(mounts, groups))


def memory_left(device: torch.device, root: Path = Path("/")) -> tuple[tuple[str, int], ...]:
    """Return what is left now of every limit on this rank's memory, as (name of what is limited, bytes).

    Names tell ranks that share a limit: those of host memory have the node's name.
    """
    if (memory := device_type_record(device).memory) is not None:
        own = memory(device)
        return ((own.name, own.free_bytes),)
    mounts, groups = read_text_file(root / "proc/self/mounts"), read_text_file(root / "proc/self/cgroup")
    found = (("machine", _machine_bytes(root, "MemAvailable")), *memory_left_within(mounts, groups))
    return tuple((f"{name} of node {node_name()}", size) for name, size in found)


def peak_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Return the most memory that this process has had so far: what torch had of a device's own, else all.

    The latter has Python, libraries and data in it; 0 where the system does not tell.
    """
    if (memory := device_type_record(device).memory) is not None:
        return memory(device).peak_bytes
    return _kilobytes(root / "proc/self/status", "VmHWM")


def _machine_bytes(root: Path, which: str = "MemTotal") -> int:
    return _kilobytes(root / "proc/meminfo", which) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _kilobytes(file: Path, which: str) -> int:
    """Return the bytes that a line `which: N kB` of a file tells; 0 where there is none."""
    for line in read_text_file(file).splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) * 1024
    return 0


STEP_OPS = 2500
"""Small ops that take what a step takes besides: 5 to 11 ms of a core for decoders of 2 to 12 blocks."""


def step_seconds(num_ops: int = STEP_OPS) -> float:
    """Return the wall seconds of so many small ops on the host, after as many that use up what quota was saved.

    Wall time, not CPU time: a host that waits for its quota is slow.
    """
    value = torch.zeros(16)
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(num_ops):
            value.add_(1.0)
    return time.perf_counter() - start
