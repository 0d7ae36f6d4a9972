"""Runs the `check_*` functions of a test module on several gloo processes, once per module.

As a fixture: `gloo_checks(module file, world)` gives {check name: [per rank: None or the traceback]}. The processes
meet after every check, so that a check may leave some of them out; they stop after the first that fails.
As a script (`python conftest.py FILE WORLD RANK FOLDER`): one of those processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic
from types import ModuleType

import pytest
from hypothesis import settings

# Tests never depend on time: a loaded machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

os.environ.setdefault("HETU_FX_PROGRESS", "0")  # what is said on stderr depends on how busy the machine is

SECONDS_PER_WAIT = 60
SECONDS_IN_ALL = 420

Outcome = dict[str, list[str | None]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let golden texts be written anew: `pytest --update-goldens`."""
    parser.addoption("--update-goldens", action="store_true", help="write golden texts anew instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Give a function that holds a text against goldens/NAME.txt beside the test's file, or writes it there."""

    def hold(name: str, text: str) -> None:
        path = request.path.parent / "goldens" / f"{name}.txt"
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.read_text() == text, f"{path.name} differs; if it should, run pytest --update-goldens"

    return hold


@pytest.fixture(scope="session")
def gloo_checks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Outcome]:
    """Give a function that runs the checks of a file on `world` processes, and remembers what came out."""
    known: dict[tuple[str, int], Outcome] = {}

    def run(file: str, world: int, seconds: float = SECONDS_IN_ALL) -> Outcome:
        if (file, world) not in known:
            known[file, world] = run_checks(file, world, tmp_path_factory.mktemp("gloo"), seconds)
        return known[file, world]

    return run


def run_checks(file: str, world: int, folder: Path, seconds: float) -> Outcome:
    """Start the processes, wait for all of them (bounded), leave none behind."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, __file__, file, str(world)]
    workers = [subprocess.Popen([*command, str(rank), str(folder)], env=environment) for rank in range(world)]
    try:
        deadline = monotonic() + seconds
        for worker in workers:
            with suppress(subprocess.TimeoutExpired):  # its report says how far it got
                worker.wait(timeout=max(0.0, deadline - monotonic()))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    reports = [_report(folder / f"rank_{rank}.json") for rank in range(world)]
    return {name: [report.get(name, "did not get that far") for report in reports] for name in checks(load(file))}


def _report(path: Path) -> dict[str, str | None]:
    return json.loads(path.read_text()) if path.exists() else {}


def load(file: str) -> ModuleType:
    """Load a test module by its path."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def checks(module: ModuleType) -> list[str]:
    """Name the checks of a module in the order in which they run."""
    return [name for name in vars(module) if name.startswith("check_")]


def work(file: str, world: int, rank: int, folder: Path) -> None:
    """Be one rank: run the checks until one fails on any rank, and write down what happened."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=SECONDS_PER_WAIT),
    )
    meeting = dist.FileStore(f"{folder}/meeting", world)
    module = load(file)
    report: dict[str, str | None] = {}
    for name in checks(module):
        try:
            getattr(module, name)(rank, world, folder)
            report[name] = None
        except (Exception, pytest.fail.Exception):  # the latter, of pytest.raises, is no Exception
            report[name] = traceback.format_exc()
        (folder / f"rank_{rank}.json").write_text(json.dumps(report))
        meeting.set(f"{name}/{rank}", "failed" if report[name] else "passed")
        if any(meeting.get(f"{name}/{other}") == b"failed" for other in range(world)):
            break


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # `tests.*`, as under pytest
    try:
        work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    except BaseException:
        traceback.print_exc()
    # A process whose peers failed must not wait for them in a destructor.
    os._exit(0)
