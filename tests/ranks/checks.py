"""Runs the `check_*` functions of a test module on several gloo processes.

The processes meet after every check, so that a check may leave some of them out; they stop after the first that fails.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from time import monotonic
from types import ModuleType

import pytest

from tests.spawned import forked

SECONDS_PER_WAIT = 60

Outcome = dict[str, list[str | None]]
"""By check what each rank says: None, or the traceback."""


def run_checks(file: str, world: int, folder: Path, seconds: float) -> Outcome:
    """Start the processes, wait for all of them (bounded), leave none behind."""
    workers = [forked(be_rank, file, world, rank, folder) for rank in range(world)]
    try:
        deadline = monotonic() + seconds
        for worker in workers:
            worker.join(max(0.0, deadline - monotonic()))  # its report says how far it got
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    reports = [_report(folder / f"rank_{rank}.json") for rank in range(world)]
    return {name: [report.get(name, "did not get that far") for report in reports] for name in checks(load(file))}


def assert_all_pass(outcome: Outcome, world: int) -> None:
    """Raise AssertionError where there is no check, or a rank has failed in one: with what each rank says."""
    assert outcome
    for name, ranks in outcome.items():
        assert ranks == [None] * world, (name, ranks)


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


def be_rank(file: str, world: int, rank: int, folder: Path) -> None:
    """Be one rank, whatever happens: a process whose peers failed must not wait for them in a destructor."""
    try:
        work(file, world, rank, folder)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def work(file: str, world: int, rank: int, folder: Path) -> None:
    """Run the checks until one fails on any rank, and write down what happened."""
    import torch
    import torch.distributed as dist

    from tests.ranks.remembered import remembered_captures

    torch.set_num_threads(1)
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
            with remembered_captures():
                getattr(module, name)(rank, world, folder)
            report[name] = None
        except (Exception, pytest.fail.Exception):  # the latter, of pytest.raises, is no Exception
            report[name] = traceback.format_exc()
        (folder / f"rank_{rank}.json").write_text(json.dumps(report))
        meeting.set(f"{name}/{rank}", "failed" if report[name] else "passed")
        if any(meeting.get(f"{name}/{other}") == b"failed" for other in range(world)):
            break
