"""The main job: train an unmodified transformers model on unequal emulated devices, and compare.

`python -m examples.demo` starts the ranks under the emulator (`rank`), then trains the same model on one process,
reads the checkpoint back, and says and draws what came out. Nothing that it prints is decided beforehand.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo.settings import CHECKPOINT, DemoSettings, settings_for
from hetu_fx.errors import EnvironmentProblem
from hetu_fx_emulate.emulate import EmulateSpec, Output, plan_run, run
from hetu_fx_emulate.emulation_plan import LimitChoice
from hetu_fx_emulate.limits import Affinity, Limiter, num_cores

if TYPE_CHECKING:
    from examples.demo.report import Comparison, Loaded

DEFAULT_FOLDER = Path("runs/demo")
TIMEOUT_SECONDS = 900.0
NEEDED = ("transformers", "matplotlib")
MARK = "demo.json"
"""Stands in every folder that the demo wrote, so that a second run may replace it."""


def run_demo(
    folder: Path = DEFAULT_FOLDER, *, quick: bool = False, limit: LimitChoice = "auto", as_json: bool = False
) -> int:
    """Run the demo and write what comes out to `folder`; give 0 when losses and weights are as they must be.

    With `as_json` what came out is printed as JSON, and all else on stderr.

    Raises EnvironmentProblem when something that it needs is not there.
    """
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        status, told = _run(folder, quick=quick, limit=limit)
    if as_json:
        print(json.dumps({"status": status, "folder": str(folder), **told}, indent=2))
    return status


def _run(folder: Path, *, quick: bool, limit: LimitChoice) -> tuple[int, dict[str, Any]]:
    """Run the demo; return its status, and what came out by name."""
    start = time.monotonic()
    _check_needed()
    make_room(folder)
    settings = settings_for(quick=quick)
    status = _run_ranks(folder, settings, quick=quick, limit=limit)
    if status != 0:
        return status, {}
    found, loaded = _conclude(folder, settings)
    seconds = time.monotonic() - start
    print(f"\n{seconds:.0f} s in all; everything is in {folder}", flush=True)
    is_right = found.is_exact and loaded.same_weights
    return 0 if is_right else 1, {"seconds": seconds, **asdict(found), **asdict(loaded)}


def _check_needed() -> None:
    """Raise EnvironmentProblem unless the packages of the demo are installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(f"the demo needs {', '.join(missing)}\nhint: pip install 'hetu-fx[hf,ui]'")


def make_room(folder: Path) -> None:
    """Make the folder, empty; only one that the demo wrote before is replaced."""
    if folder.exists():
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / MARK).exists()):
            raise EnvironmentProblem(f"{folder} exists and is not a demo's\nhint: choose another with --output")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).write_text("{}\n")


def _run_ranks(folder: Path, settings: DemoSettings, *, quick: bool, limit: LimitChoice) -> int:
    limiter = plan_run(EmulateSpec(speeds=settings.speeds), limit=limit).limiter
    quotas = not isinstance(limiter, Affinity)
    # With quotas they start at equal speeds: a device of 0.2 cores takes half a minute to import torch.
    spec = EmulateSpec(speeds=settings.equal_speeds(num_cores(limiter)) if quotas else settings.speeds)
    print(f"demo: {settings.world_size} processes of {_speeds_text(settings, limiter)}", flush=True)
    flags = ["--quick"] * quick + ["--quotas"] * quotas
    return run(
        spec,
        [sys.executable, "-m", "examples.demo.rank", str(folder), *flags],
        output=Output(prefix=False, only_rank=0),
        timeout_seconds=TIMEOUT_SECONDS,
        limit=limit,
    )


def _speeds_text(settings: DemoSettings, limiter: Limiter) -> str:
    shown = ", ".join(f"{speed:g}" for speed in settings.speeds)
    if isinstance(limiter, Affinity):
        return f"about {shown} cores: slow ones share a core, as there are no CPU quotas ({limiter.reason})"
    return f"{shown} cores, once all have started"


def _conclude(folder: Path, settings: DemoSettings) -> tuple[Comparison, Loaded]:
    """Train on one process, read the checkpoint, compare, and write the rest."""
    from examples.demo.record import RunRecord
    from examples.demo.report import compare, comparison_text, draw_run, write_files
    from examples.demo.screen import make_screen
    from examples.demo.training import load_checkpoint, train_alone

    screen = make_screen()
    record = RunRecord.read(folder / "run.json")
    screen.head("The same training on one process")
    reference = train_alone(settings, screen)
    loaded = load_checkpoint(folder / CHECKPOINT, record.weights, settings)
    found = compare(record, reference, settings)
    write_files(folder, record, settings)
    draw_run(folder / "demo.png", record, reference, found, settings)
    screen.head("Side by side")
    screen.say(comparison_text(record, reference, loaded, found, settings))
    screen.end()
    return found, loaded
