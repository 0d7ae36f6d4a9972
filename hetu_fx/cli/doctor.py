"""`hetu-fx doctor`: what is wrong with the machine, the installation or the job, and what to do.

Alone it looks at this machine, and then starts two processes of itself, which look at what only several can tell.
Under a launcher it looks at that job. `hetu-fx env` says what a bug report should: versions, backends, what this
machine can emulate.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from hetu_fx.base.documents import nearest
from hetu_fx.base.frameworks import above_tested, numbers, upper_bound
from hetu_fx.cli.finding import Finding, conclusion, make_finding
from hetu_fx_emulate.command import nodes_text, speeds_text

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
        **{package: _version(package) or "not installed" for package in PACKAGES},
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "devices": ", ".join(_device_names()),
        "collectives": ", ".join(_backends()) or "none",
        "emulated speeds": speeds_text(),
        "emulated nodes": nodes_text(),
    }


def _device_names() -> list[str]:
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


LEAST_MEMORY, LEAST_SHARED = 1 << 30, 256 << 20  # bytes: below these people have seen processes killed
SETTINGS = (
    "HETU_FX_CHECK",
    "HETU_FX_DUMP_PASSES",
    "HETU_FX_EMULATED_MEMORY",
    "HETU_FX_EMULATED_SPEEDS",
    "HETU_FX_EMULATE_CONTROL",
    "HETU_FX_JOB",
    "HETU_FX_NODE",
    "HETU_FX_PLAN",
    "HETU_FX_PROGRESS",
    "HETU_FX_SECRET",
    "HETU_FX_START",
    "HETU_FX_WAIT_SECONDS",
)


def _machine_findings() -> Iterator[Finding]:
    """Yield what each check says; none of them needs a job."""
    for check in _CHECKS:
        yield check()
    yield from _package_findings(metadata.requires("hetu-fx") or [])


def _python() -> Finding:
    return make_finding("python", f"{platform.python_version()} on {platform.platform()}")


def _package_findings(requirements: list[str]) -> Iterator[Finding]:
    """Yield how the installed packages fit what hetu_fx requires; those of extras may be missing."""
    for line in requirements:
        name, bounds, extra = split_requirement(line)
        if extra in ("", "hf"):
            yield package_finding(name, bounds, _version(name), is_needed=not extra)


def split_requirement(requirement: str) -> tuple[str, list[tuple[str, str]], str]:
    """Split a requirement into its name, its bounds, and the extra that it belongs to."""
    spec, _, marker = requirement.partition(";")
    found = re.match(r"[\w.-]+", spec.strip())
    extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
    bounds = re.findall(r"(>=|<)\s*([\d.]+)", spec)
    return ("" if found is None else found[0]), bounds, ("" if extra is None else extra[1])


def package_finding(name: str, bounds: list[tuple[str, str]], version: str, *, is_needed: bool) -> Finding:
    """Tell whether a version ("" for none) is within bounds."""
    asked = ",".join(sign + bound for sign, bound in bounds)
    install = f"pip install '{name}{asked}'"
    if not version:
        return (
            make_finding(name, "not installed", wrong=install)
            if is_needed
            else make_finding(name, "not installed, not needed")
        )
    if all((numbers(version) >= numbers(bound)) == (sign == ">=") for sign, bound in bounds):
        newest = above_tested(name, version)
        says = f"{version}, newer than {newest}, the newest that was tested" if newest else version
        way = f"if something fails that should not: pip install '{name}<{upper_bound(newest)}'" if newest else ""
        return make_finding(name, says, doubtful=way)
    says = f"{version}, but hetu_fx needs {asked}"
    return make_finding(name, says, wrong=install) if is_needed else make_finding(name, says, doubtful=install)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _collectives() -> Finding:
    import torch
    import torch.distributed as dist

    from hetu_fx.base.device_types import computing

    if not (dist.is_available() and dist.is_gloo_available()):
        return make_finding("collectives", "this torch has no gloo", wrong="install torch from pytorch.org or PyPI")
    for kind in computing():
        if kind.is_direct and not dist.is_backend_available(kind.process_groups):
            told = f"gloo, no {kind.process_groups}: {kind.name} devices meet through the host"
            return make_finding("collectives", told, doubtful=f"install a torch that has {kind.process_groups}")
    if not dist.is_nccl_available():
        return make_finding("collectives", "gloo")
    return make_finding("collectives", f"gloo and {nccl_of(torch.__version__, os.environ)}")


def nccl_of(version: str, environment: Mapping[str, str]) -> str:
    """Return which of torch's two NCCL backends "nccl" stands for: nccl2 by default from 2.15 on."""
    by_default = "1" if numbers(version) >= (2, 15) else "0"
    is_new = numbers(version) >= (2, 14) and environment.get("TORCH_DIST_USE_NCCL2", by_default) == "1"
    return "nccl2 (as nccl; TORCH_DIST_USE_NCCL2=0 takes the older one)" if is_new else "nccl"


def _devices() -> Finding:
    import torch

    from hetu_fx.base.device_types import computing

    names = [kind.chip(torch.device(kind.name, index)) for kind in computing() for index in range(kind.count())]
    if not names and Path("/dev/nvidia0").exists():
        way = "install torch's CUDA build, and a driver that fits it; see CUDA_VISIBLE_DEVICES"
        return make_finding("devices", "there is an NVIDIA device, but torch sees none", doubtful=way)
    return make_finding("devices", ", ".join(names) or "cpu")


def _launch() -> Finding:
    from hetu_fx.base.frameworks import launchers

    return launch_finding(os.environ, {one.variable: one.two_processes for one in launchers()})


def launch_finding(environment: Mapping[str, str], launchers: Mapping[str, str]) -> Finding:
    """Tell whether a launcher has said all that processes need to meet; `launchers`: commands by their variables."""
    world = environment.get("WORLD_SIZE", "")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if world not in ("", "1"):
        way = f"start with {next(iter(launchers.values()))}, or set {', '.join(missing)}"
        return make_finding("launch", f"rank {environment.get('RANK')} of {world}", wrong=way if missing else "")
    started = [command for variable, command in launchers.items() if variable in environment]
    way = f"for two CPU processes: {started[0]}" if started else ""
    return make_finding("launch", "one process" + (" by a launcher" if started else ", no launcher"), doubtful=way)


def _address() -> Finding:
    from hetu_fx.base.addresses import Contact
    from hetu_fx.errors import EnvironmentProblem

    name = socket.gethostname()
    try:
        reach = Contact.own()
        places = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except EnvironmentProblem as problem:
        says, _, hint = str(problem).partition("\nhint: ")
        return make_finding("address", says, wrong=hint)
    except OSError as problem:
        way = f"add a line '127.0.1.1 {name}' to /etc/hosts: scripts that join their ranks themselves look for it"
        return make_finding("address", f"the host's name {name} has no address ({problem})", doubtful=way)
    return make_finding(
        "address", f"{reach.source} to {reach.target or 'other machines'}; {name} is {', '.join(places)}"
    )


def _interface() -> Finding:
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    known = [name for _, name in socket.if_nameindex()]
    missing = [name for name in given.split(",") if name and name not in known]
    way = f"set GLOO_SOCKET_IFNAME to one of {', '.join(known)}" if missing else ""
    return make_finding("interface", given or f"chosen by gloo, of {', '.join(known)}", wrong=way)


def _threads() -> Finding:
    import torch

    from hetu_fx.base.cgroups import own_quota

    each, count = torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = min(len(os.sched_getaffinity(0)), own_quota() or float("inf"))
    way = f"set OMP_NUM_THREADS={max(1, int(cores) // count)}" if each * count > max(cores, count) else ""
    return make_finding("threads", f"{each} in each of {count} processes, on {cores:g} cores", doubtful=way)


def _memory() -> Finding:
    import torch

    from hetu_fx.cluster.host import memory_left

    name, left = min(memory_left(torch.device("cpu")), key=lambda limit: limit[1])
    way = "end what else runs, or raise the limit; processes that need more are killed" if left < LEAST_MEMORY else ""
    return make_finding("memory", f"{left / 1e9:.3g} GB left ({name.partition(' of node ')[0]})", doubtful=way)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return make_finding("shared memory", "there is none", doubtful="set num_workers=0 in DataLoaders")
    left = shutil.disk_usage(folder).free
    way = "in a container: --shm-size=2g; or num_workers=0 in DataLoaders" if left < LEAST_SHARED else ""
    return make_finding("shared memory", f"{left / 1e9:.3g} GB left", doubtful=way)


def _cache() -> Finding:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    there = next(place for place in (folder, *folder.parents) if place.exists())
    way = "" if os.access(there, os.W_OK) else "set XDG_CACHE_HOME to a folder that can be written: plans are kept"
    return make_finding("cache", str(folder / "hetu_fx"), doubtful=way)


def _settings() -> Finding:
    return settings_finding(sorted(name for name in os.environ if name.startswith("HETU_FX_")))


def settings_finding(given: list[str]) -> Finding:
    """Tell whether all variables of the environment that begin with HETU_FX_ are known."""
    unknown = [f"{name}: {nearest(name, SETTINGS)}" for name in given if name not in SETTINGS]
    way = f"not known, {'; '.join(unknown)}" if unknown else ""
    return make_finding("settings", ", ".join(given) or "none", doubtful=way)


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _collectives,
    _devices,
    _launch,
    _address,
    _interface,
    _threads,
    _memory,
    _shared_memory,
    _cache,
    _settings,
)


TRIAL_SECONDS = 180.0
_OF_JOBS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx doctor`."""
    parser.usage = (
        "hetu-fx doctor [--quick] [--json]\n"
        "       torchrun --nproc-per-node 8 -m hetu_fx.cli doctor [--device cuda] [--json]"
    )
    parser.add_argument("--quick", action="store_true", help="do not start two processes to see whether they meet")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: what is measured in a job (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def call_doctor(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx doctor`; the status is 1 if something is wrong. In a job rank 0 prints."""
    in_job = int(os.environ.get("WORLD_SIZE", "1")) > 1
    shown = os.environ.get("RANK", "0") == "0"
    findings = []
    for finding in _findings(options, in_job=in_job):
        findings.append(finding)
        if shown and not options.json:
            print(finding, flush=True)
    if shown:
        told = {"findings": [finding.to_json() for finding in findings], "conclusion": conclusion(findings)}
        print(json.dumps(told, indent=2) if options.json else told["conclusion"])
    return int(any(finding.state == "wrong" for finding in findings))


def _findings(options: argparse.Namespace, *, in_job: bool) -> Iterator[Finding]:
    yield from _machine_findings()
    if in_job:
        yield from _of_this_job(options.device)
    elif not options.quick:
        yield from _of_two_processes()


def _of_this_job(device: str) -> Iterator[Finding]:
    import torch.distributed as dist

    from hetu_fx.cli.given import local_device
    from hetu_fx.cli.job_checks import job_findings
    from hetu_fx.comm_ops.wire.groups import GroupTable
    from hetu_fx.prepare import join_world

    join_world()
    yield from job_findings(GroupTable(), local_device(device))
    dist.destroy_process_group()


def _of_two_processes() -> Iterator[Finding]:
    """Start two processes of this command, and yield what they find as a job."""
    print("starting two processes, to see whether they meet ...", file=sys.stderr, flush=True)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command = [*launcher, "--rdzv-endpoint", "localhost:0", "-m", "hetu_fx.cli", "doctor", "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_JOBS}
    try:
        ended = subprocess.run(
            [sys.executable, *command],
            env={"OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
            check=False,
        )
        yield from trial_findings(ended.stdout, ended.stderr)
    except subprocess.TimeoutExpired:
        way = "see whether a firewall or a proxy stands between processes; set GLOO_SOCKET_IFNAME=lo to try"
        yield make_finding("two processes", f"have not met within {TRIAL_SECONDS:g} s", wrong=way)


def trial_findings(printed: str, errors: str) -> Iterator[Finding]:
    """Yield what two processes found as a job, from what they printed; or what became of them."""
    try:
        told = json.loads(printed)["findings"]
    except ValueError:
        last = (errors.strip().splitlines() or ["nothing was said"])[-1]
        way = "run the command yourself: torchrun --nproc-per-node 2 -m hetu_fx.cli doctor"
        yield make_finding("two processes", f"failed: {last}", wrong=way)
        return
    yield make_finding("two processes", "meet")
    names = ("versions of all ranks", "clocks", "speeds", "links")
    yield from (Finding(**one) for one in told if one["what"].startswith(names))
