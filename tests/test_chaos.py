"""Runs that lose processes end as those of one process without faults do, under our launcher and under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos import check, without_faults
from tests.chaos_job import SCRIPT, Lines, set_steps

STEPS = 12
SECONDS = 900  # a machine may be busy; it is no measurement

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(SECONDS)]


def test_a_run_with_faults_at_random_moments_is_that_without() -> None:
    words = ["--faults", "3", "--seed", "3", "--stopped-after", "10", "--hang-after", str(SECONDS // 4)]
    command = [sys.executable, "-m", "tests.chaos", *words, "--kinds", "kill", "nan", "full"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS - 60, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert json.loads(ended.stdout.splitlines()[-1])["faults"] == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_under_torchrun_a_lost_process_costs_no_finished_step(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "restarted"
    folder.mkdir()
    set_steps(folder, STEPS)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    process = subprocess.Popen([*launch, str(SCRIPT), str(folder)], start_new_session=True)
    try:
        progress = Lines(folder / "progress.jsonl")
        killed_at = lose_one_after(4, number, folder, progress, process)
        assert process.wait(timeout=SECONDS / 2) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)
    resumed = [line for line in progress() if "resumed" in line]
    assert [line["source"] for line in resumed] == ["start", "memory"]
    assert resumed[1]["resumed"] >= killed_at
    check(json.loads((folder / "result.json").read_text()), without_faults(tmp_path / "right", STEPS), STEPS)


def lose_one_after(
    steps: int, number: signal.Signals, folder: Path, progress: Lines, process: subprocess.Popen[bytes]
) -> int:
    """Signal a process once so many steps are done and the snapshot of the one before is whole; returns its step."""
    deadline = time.monotonic() + SECONDS / 3
    while sum("step" in line for line in progress()) < steps:
        assert time.monotonic() < deadline, "no steps"
        assert process.poll() is None, "torchrun has ended"
        time.sleep(0.005)
    victim = max(folder.glob("phase_*"))
    os.kill(int(victim.name.removeprefix("phase_")), number)
    return steps - 1
