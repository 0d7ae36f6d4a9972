"""Removes what an emulation left behind, by the name of the run.

The emulator runs `main` in a process of its own (the janitor): it waits until the emulator is gone, however it
went, and then ends the run's processes and removes its cgroups, network namespaces and control folder. It
needs nothing of hetu_fx but `base.machine`, so that this costs no import of torch.

A run is named hetu-fx-NAMESPACE-PID-START-SERIAL after the process that runs it (its pid namespace, pid and
start time), so a later run can tell a dead run's leftovers from a living neighbour's.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from hetu_fx.base.machine import pid_namespace, start_time

RUN_NAME = re.compile(r"hetu-fx-(\d+)-(\d+)-(\d+)-(\d+)")
PROCESSES_FILE = "processes"  # in the control folder: "pid start" per rank, for runs without cgroups
NAMESPACES = Path("/run/netns")
KILL_SECONDS = 5.0


def run_name(serial: int) -> str:
    """Name the `serial`-th run of this process."""
    return f"hetu-fx-{pid_namespace()}-{os.getpid()}-{start_time(os.getpid())}-{serial}"


def is_dead(name: str) -> bool:
    """Tell whether the process that runs the run `name` is surely gone."""
    match = RUN_NAME.match(name)
    if match is None or int(match[1]) != pid_namespace():
        return False
    return start_time(int(match[2])) != int(match[3])


def sweep(cgroup_bases: Iterable[Path]) -> tuple[str, ...]:
    """Remove what dead runs left; return their names."""
    bases = tuple(cgroup_bases)
    dead = sorted(name for name in set(_run_names(bases)) if is_dead(name))
    for name in dead:
        remove_run(name, bases)
    return tuple(dead)


def remove_run(name: str, cgroup_bases: Iterable[Path]) -> None:
    """End every process of a run and remove its cgroups, namespaces and control folder. May be repeated."""
    for folder in _control_folders(name):
        _kill_groups(folder / PROCESSES_FILE)
    for base in cgroup_bases:
        _remove_cgroup(base / name)
    for namespace in _entries(NAMESPACES):
        if namespace.name.startswith(f"{name}-"):
            subprocess.run(["ip", "netns", "delete", namespace.name], check=False, capture_output=True)
    for folder in _control_folders(name):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_cgroup(folder: Path) -> None:
    """Kill the processes of a cgroup and its children, then remove the folders."""
    if not folder.is_dir():
        return
    deadline = time.monotonic() + KILL_SECONDS
    while (pids := _processes_in(folder)) and time.monotonic() < deadline:
        for pid in pids:
            _kill(pid)
        time.sleep(0.01)
    for child in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        _remove_folder(child)
    _remove_folder(folder)


def _processes_in(folder: Path) -> tuple[int, ...]:
    """List the processes of a cgroup and its children."""
    pids: list[int] = []
    for path in folder.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):  # the child was removed between the listing and the reading
            pids.extend(int(word) for word in path.read_text().split())
    return tuple(pids)


def _remove_folder(folder: Path) -> None:
    # The kernel frees a cgroup a moment after its last process is gone.
    for _ in range(100):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return


def _kill_groups(file: Path) -> None:
    """Kill the process groups named in `file`, except where the number now belongs to somebody else."""
    for line in file.read_text().splitlines() if file.is_file() else ():
        pid, start = (int(word) for word in line.split())
        if start_time(pid) in (start, None):
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _run_names(cgroup_bases: tuple[Path, ...]) -> Iterator[str]:
    for folder in (*cgroup_bases, NAMESPACES, Path(tempfile.gettempdir())):
        for entry in _entries(folder):
            match = RUN_NAME.match(entry.name)
            if match is not None:
                yield match[0]


def _control_folders(name: str) -> list[Path]:
    """List the control folders of a run; only our own user's, since the temporary folder is everybody's."""
    found = [path for path in _entries(Path(tempfile.gettempdir())) if path.name.startswith(f"{name}-")]
    return [path for path in found if path.lstat().st_uid == os.getuid() and not path.is_symlink()]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def main(arguments: list[str]) -> int:
    """Wait for the end of standard input (the emulator holds the other end), then remove the run."""
    name, *bases = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    remove_run(name, [Path(base) for base in bases])
    return 0
