"""Changes a running emulation from outside or from one of its ranks, through its control folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hetu_fx.emulate.cleanup import is_dead
from hetu_fx.emulate.limits import CgroupV1, CgroupV2, Limiter, cgroup_bases, num_cores, speed_settings
from hetu_fx.emulate.plan import RunPlan
from hetu_fx.emulate.spec import check_cores, check_speed
from hetu_fx.errors import EnvironmentProblem

CONTROL_VARIABLE = "HETU_FX_EMULATE_CONTROL"
STATE_FILE = "state.json"


def change_speed(rank: int, speed: float, control: str | os.PathLike[str] | None = None) -> None:
    """Give a rank of a running emulation another speed, from now on.

    control: the run's control folder; left out, the one this process runs in, or else the only one running.

    Raises EnvironmentProblem when there is no such run or rank, when the speeds would not fit the cores any
    more, or when the run has no quotas to change.
    """
    folder = _control_folder(control)
    with _locked_state(folder) as file:
        state = json.load(file)
        speeds = list(state["speeds"])
        if not 0 <= rank < len(speeds):
            raise EnvironmentProblem(f"no rank {rank} to change: the emulation runs ranks 0 to {len(speeds) - 1}")
        check_speed(rank, speed)
        limiter = _limiter_of(state)
        speeds[rank] = float(speed)
        check_cores(tuple(speeds), state["num_cores"])
        for setting in speed_settings(limiter, state["name"], rank, speed):
            setting.write()
        _rewrite(file, {**state, "speeds": speeds})


def current_speeds(control: str | os.PathLike[str] | None = None) -> tuple[float, ...]:
    """Give the speeds of a running emulation (see change_speed), changes included."""
    with _locked_state(_control_folder(control)) as file:
        return tuple(json.load(file)["speeds"])


def current_cores(control: str | os.PathLike[str] | None = None) -> float:
    """Give the cores that the ranks of a running emulation (see change_speed) share; not all of them can be given."""
    with _locked_state(_control_folder(control)) as file:
        return float(json.load(file)["num_cores"])


def write_first_state(folder: Path, plan: RunPlan) -> None:
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


def _limiter_of(state: dict[str, Any]) -> Limiter:
    bases = [Path(base) for base in state["bases"]]
    match state["kind"]:
        case "CgroupV1":
            return CgroupV1(bases[0], None)
        case "CgroupV2":
            return CgroupV2(bases[0])
        case kind:
            raise EnvironmentProblem(
                f"cannot change speeds of an emulation by {kind.lower()}: only CPU quotas change; run as root"
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
            f"not one running emulation to change (found: {names}); name its folder in {CONTROL_VARIABLE}"
        )
    return living[0]


@contextlib.contextmanager
def _locked_state(folder: Path) -> Iterator[IO[str]]:
    try:
        file = (folder / STATE_FILE).open("r+")
    except OSError as error:
        raise EnvironmentProblem(f"no running emulation in {folder} ({error.strerror})") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _rewrite(file: IO[str], state: dict[str, Any]) -> None:
    file.seek(0)
    file.truncate()
    json.dump(state, file)
    file.flush()
