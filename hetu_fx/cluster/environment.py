"""Describes the machine: versions, backends, and what can be emulated on it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from typing import assert_never

from hetu_fx.emulate.limits import Affinity, CgroupV1, CgroupV2, this_limiter

PACKAGES = (
    "hetu-fx",
    "torch",
    "numpy",
    "scipy",
    "safetensors",
    "transformers",
    "accelerate",
    "rich",
    "matplotlib",
)


def environment_lines() -> Iterator[str]:
    """Yield the machine's description, one "name: value" a line. Imports torch."""
    yield f"python: {platform.python_version()} on {platform.platform()}"
    for package in PACKAGES:
        yield f"{package}: {_version(package)}"
    yield f"cores: {len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    yield f"devices: {', '.join(_devices())}"
    yield f"collectives: {', '.join(_backends()) or 'none'}"
    yield f"emulated speeds: {_speeds()}"
    yield f"emulated nodes: {_nodes()}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ["cpu", *(f"cuda:{index} ({name})" for index, name in enumerate(names))]


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    known = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    return [name for name, there in known.items() if there]


def _speeds() -> str:
    limiter = this_limiter()
    match limiter:
        case CgroupV1(cpu, memory):
            return f"CPU quotas{'' if memory is None else ' and memory limits'} (cgroups version 1, {cpu})"
        case CgroupV2(base):
            return f"CPU quotas and memory limits (cgroups version 2, {base})"
        case Affinity(reason):
            return f"CPU affinity only: {reason}"
        case _:
            assert_never(limiter)


def _nodes() -> str:
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"no: {', '.join(missing)} not found"
    return "yes" if os.geteuid() == 0 else "no: needs root"
