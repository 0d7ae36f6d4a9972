"""Runs a command on unequal emulated devices of one machine: one process per rank, each with its own speed.

A rank's speed is a CPU quota, its memory a cgroup limit, its node a network namespace. `plan_run` decides
(and is what --dry-run prints), `run` does it, `change_speed` makes a rank slower or faster while it runs.
Whatever ends a run, nothing of it stays: see emulate_cleanup.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetu_fx.emulate.cleanup import PROCESSES_FILE, SCRIPT, remove_run, start_time, sweep
from hetu_fx.emulate.control import CONTROL_VARIABLE, change_speed, current_cores, current_speeds, write_first_state
from hetu_fx.emulate.limits import cgroup_bases, num_memory_kills, this_limiter
from hetu_fx.emulate.network import run_command
from hetu_fx.emulate.plan import DEFAULT_PORT, LimitChoice, RunPlan, describe, plan_run, size_text
from hetu_fx.emulate.processes import Crew, Output, RankStart
from hetu_fx.emulate.spec import EmulateSpec
from hetu_fx.errors import EnvironmentProblem

__all__ = ["EmulateSpec", "Output", "change_speed", "current_cores", "current_speeds", "plan_run", "run"]


def run(
    spec: EmulateSpec,
    command: Sequence[str],
    *,
    output: Output | None = None,
    timeout_seconds: float | None = None,
    grace_seconds: float = 10.0,
    limit: LimitChoice = "auto",
) -> int:
    """Run `command` once per rank; give its exit status.

    The status is that of the rank that failed first, 128 + n after signal n, 124 after `timeout_seconds`, 0
    otherwise. When one rank fails, the others get `grace_seconds` to end. Raises EnvironmentProblem, with
    nothing left behind, when the machine cannot give what `spec` asks for.
    """
    if not command:
        raise EnvironmentProblem("no command to run; write it after --, e.g. -- python train.py")
    if shutil.which(command[0]) is None:
        raise EnvironmentProblem(f"command {command[0]!r} is not to be found or not executable")
    plan = plan_run(spec, limit=limit, port=_free_port() if spec.num_nodes == 1 else DEFAULT_PORT)
    crew = Crew(output or Output(), grace_seconds)
    with crew.forwarding(), _prepared(plan) as control:
        crew.say(describe(plan))
        try:
            _start(plan, command, crew, control)
            status = crew.wait(timeout_seconds)
        finally:
            crew.end()
        _say_memory_kills(plan, crew)
    crew.close()
    return status


@contextlib.contextmanager
def _prepared(plan: RunPlan) -> Iterator[Path]:
    """Make cgroups, network and control folder; remove them at the end, or leave it to the janitor."""
    bases = cgroup_bases(plan.limiter)
    sweep(cgroup_bases(this_limiter()))
    control = Path(tempfile.mkdtemp(prefix=f"{plan.name}-"))
    janitor = _start_janitor(plan.name, bases)
    try:
        for folder in plan.folders:
            _make_folder(folder)
        for setting in plan.settings:
            setting.write()
        for command in plan.network:
            run_command(command)
        write_first_state(control, plan)
        yield control
    finally:
        remove_run(plan.name, bases)
        janitor.communicate()


def _start_janitor(name: str, bases: tuple[Path, ...]) -> subprocess.Popen[bytes]:
    # By its file and isolated, so that it imports nothing of ours; in a session of its own, so that it stays.
    script = (sys.executable, "-I", str(SCRIPT), name, *map(str, bases))
    return subprocess.Popen(script, stdin=subprocess.PIPE, start_new_session=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir()
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot make the cgroup {folder} ({error.strerror}); run as root, or use --limit affinity"
        ) from error


def _start(plan: RunPlan, command: Sequence[str], crew: Crew, control: Path) -> None:
    for rank in plan.ranks:
        environment = {**os.environ, **dict(rank.environment), CONTROL_VARIABLE: str(control)}
        pid = crew.start(RankStart(rank.rank, rank.argv(command), environment, rank.core))
        with (control / PROCESSES_FILE).open("a") as file:
            file.write(f"{pid} {start_time(pid) or 0}\n")


def _say_memory_kills(plan: RunPlan, crew: Crew) -> None:
    for rank, size in enumerate(plan.spec.memory):
        if size is not None and num_memory_kills(plan.limiter, plan.name, rank):
            crew.say(f"rank {rank} was killed by the kernel: it needed more than its {size_text(size)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
