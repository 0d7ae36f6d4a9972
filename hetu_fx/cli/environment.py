"""`hetu-fx env`: versions, backends and what this machine can emulate; what a bug report should say."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Sequence
from importlib import metadata
from typing import assert_never

from hetu_fx.launch.emulate.limits import Affinity, CgroupV1, CgroupV2, this_limiter

PACKAGES = ("hetu-fx", "torch", "numpy", "scipy", "safetensors", "transformers", "accelerate", "rich", "matplotlib")


def call_env(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx env`."""
    told = _environment()
    print(json.dumps(told, indent=2) if options.json else "\n".join(f"{name}: {says}" for name, says in told.items()))
    return 0


def _environment() -> dict[str, str]:
    """Return the machine's description by the names of its lines."""
    return {
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{package: _version(package) for package in PACKAGES},
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "devices": ", ".join(_devices()),
        "collectives": ", ".join(_backends()) or "none",
        "emulated speeds": _speeds(),
        "emulated nodes": _nodes(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    import torch

    from hetu_fx.base.device_types import computing

    found = [(kind, torch.device(kind.name, index)) for kind in computing() for index in range(kind.count())]
    return ["cpu", *(f"{device} ({kind.chip(device)})" for kind, device in found)]


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
