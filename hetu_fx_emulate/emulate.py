"""Runs a command on unequal emulated devices of one machine: one process per rank, each with its own speed.

A rank's speed is a CPU quota, its memory a cgroup limit, its node a network namespace. `plan_run` decides
(and is what --dry-run prints), `run` does it, `change_speed` makes a rank slower or faster while it runs.
A run has a control folder, through which it is changed from outside or by one of its ranks. Whatever ends a run,
nothing of it stays: see `cleanup`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from hetu_fx.base.documents import open_regular, parse_json, told_as_damaged
from hetu_fx.base.machine import start_time
from hetu_fx.errors import EnvironmentProblem
from hetu_fx_emulate.cleanup import PROCESSES_FILE, is_dead, main, remove_run, sweep
from hetu_fx_emulate.emulation_plan import DEFAULT_PORT, LimitChoice, RunPlan, describe, plan_run, size_text
from hetu_fx_emulate.limits import (
    CgroupV1,
    CgroupV2,
    Limiter,
    cgroup_bases,
    num_cores,
    num_memory_kills,
    speed_settings,
    this_limiter,
)
from hetu_fx_emulate.network import run_command
from hetu_fx_emulate.processes import Crew, Output
from hetu_fx_emulate.spec import EmulateSpec, check_cores, check_speed

__all__ = ["EmulateSpec", "Output", "change_speed", "current_speeds", "lift_speeds", "plan_run", "run"]


def run(
    spec: EmulateSpec,
    command: Sequence[str],
    *,
    output: Output | None = None,
    timeout_seconds: float | None = None,
    grace_seconds: float = 10.0,
    limit: LimitChoice = "auto",
) -> int:
    """Run `command` once per rank; return its exit status.

    The status is that of the rank that failed first, 128 + n after signal n, 124 after `timeout_seconds`, 0
    otherwise. When one rank fails, the others get `grace_seconds` to end. Raises EnvironmentProblem, with
    nothing left behind, when the machine cannot give what `spec` asks for.
    """
    if not command:
        raise EnvironmentProblem("no command to run\nhint: write it after --, e.g. -- python train.py")
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
        _write_first_state(control, plan)
        yield control
    finally:
        remove_run(plan.name, bases)
        janitor.communicate()


def _start_janitor(name: str, bases: tuple[Path, ...]) -> subprocess.Popen[bytes]:
    # Isolated, with our own path; in a session of its own, so that it stays.
    code = f"import sys; sys.path[:] = {sys.path!r}; from {main.__module__} import main; main(sys.argv[1:])"
    janitor = (sys.executable, "-I", "-c", code, name, *map(str, bases))
    return subprocess.Popen(janitor, stdin=subprocess.PIPE, start_new_session=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir()
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot make the cgroup {folder} ({error.strerror})\nhint: run as root, or use --limit affinity"
        ) from error


def _start(plan: RunPlan, command: Sequence[str], crew: Crew, control: Path) -> None:
    for rank in plan.ranks:
        environment = {**os.environ, **dict(rank.environment), CONTROL_VARIABLE: str(control)}
        pid = crew.start(rank.rank, rank.argv(command), environment, rank.core)
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


CONTROL_VARIABLE = "HETU_FX_EMULATE_CONTROL"


STATE_FILE = "state.json"
MOST_STATE_BYTES = 1 << 20


def change_speed(rank: int, speed: float, control: str | os.PathLike[str] | None = None) -> None:
    """Give a rank of a running emulation another speed, from now on.

    control: the run's control folder; left out, the one this process runs in, or else the only one running.

    Raises EnvironmentProblem when there is no such run or rank, when the speeds would not fit the cores any
    more, or when the run has no quotas to change.
    """
    folder = _control_folder(control)
    with _locked_state(folder) as file:
        state = _read_state(file)
        speeds = list(state["speeds"])
        if not 0 <= rank < len(speeds):
            raise EnvironmentProblem(f"no rank {rank} to change\nhint: name one of ranks 0 to {len(speeds) - 1}")
        check_speed(rank, speed)
        limiter = _limiter_of(state)
        speeds[rank] = float(speed)
        check_cores(tuple(speeds), state["num_cores"])
        for setting in speed_settings(limiter, state["name"], rank, speed):
            setting.write()
        _rewrite(file, {**state, "speeds": speeds})


def lift_speeds(control: str | os.PathLike[str] | None = None) -> None:
    """Let each rank of a running emulation (see change_speed) use all cores; its speed is 0 until it is changed."""
    folder = _control_folder(control)
    with _locked_state(folder) as file:
        state = _read_state(file)
        limiter, ranks = _limiter_of(state), range(len(state["speeds"]))
        for setting in chain(*(speed_settings(limiter, state["name"], rank, state["num_cores"]) for rank in ranks)):
            setting.write()
        _rewrite(file, {**state, "speeds": [0.0 for _ in ranks]})


def current_speeds(control: str | os.PathLike[str] | None = None) -> tuple[float, ...]:
    """Return the speeds of a running emulation (see change_speed), changes included."""
    with _locked_state(_control_folder(control)) as file:
        return tuple(map(float, _read_state(file)["speeds"]))


def _write_first_state(folder: Path, plan: RunPlan) -> None:
    """Write what change_speed needs to know about a run."""
    state = {
        "format": "hetu_fx.emulation/1",
        "name": plan.name,
        "kind": type(plan.limiter).__name__,
        "bases": [str(base) for base in cgroup_bases(plan.limiter)],
        "speeds": list(plan.spec.speeds),
        "num_cores": num_cores(plan.limiter),
    }
    (folder / STATE_FILE).write_text(json.dumps(state))


def _read_state(file: BinaryIO) -> dict[str, Any]:
    where = f"the emulation's {STATE_FILE}"
    state: dict[str, Any] = parse_json(file.read(MOST_STATE_BYTES), where, EnvironmentProblem)
    with told_as_damaged(where, EnvironmentProblem):
        if not all(type(state[key]) is list for key in ("bases", "speeds")):
            raise TypeError("'bases' and 'speeds' are no lists")
        numbers = [state["num_cores"], *state["speeds"]]
        if any(type(number) not in (int, float) for number in numbers):
            raise TypeError(f"{numbers} are not all numbers")
    return state


def _limiter_of(state: dict[str, Any]) -> Limiter:
    bases = [Path(base) for base in state["bases"]]
    match state["kind"]:
        case "CgroupV1":
            return CgroupV1(bases[0], None)
        case "CgroupV2":
            return CgroupV2(bases[0])
        case kind:
            raise EnvironmentProblem(
                f"cannot change speeds of an emulation by {kind.lower()}: only CPU quotas change\nhint: run as root"
            )


def _control_folder(control: str | os.PathLike[str] | None) -> Path:
    """Find the control folder: given, from the environment, or of the only run there is."""
    named = control or os.environ.get(CONTROL_VARIABLE)
    if named is not None:
        return Path(named)
    found = [path for path in Path(tempfile.gettempdir()).glob("hetu-fx-*") if (path / STATE_FILE).is_file()]
    living = [path for path in found if not is_dead(path.name)]
    if len(living) != 1:
        names = ", ".join(str(path) for path in living) or "none"
        raise EnvironmentProblem(
            f"not one running emulation to change (found: {names})\nhint: name its folder in {CONTROL_VARIABLE}"
        )
    return living[0]


@contextlib.contextmanager
def _locked_state(folder: Path) -> Iterator[BinaryIO]:
    if not (folder / STATE_FILE).is_file():
        raise EnvironmentProblem(f"no running emulation in {folder}: there is no {STATE_FILE} in it")
    with open_regular(folder / STATE_FILE, EnvironmentProblem, writable=True) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _rewrite(file: BinaryIO, state: dict[str, Any]) -> None:
    file.seek(0)
    file.truncate()
    file.write(json.dumps(state).encode())
    file.flush()
