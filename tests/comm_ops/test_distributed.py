"""The ops on real gloo ranks: values and gradients of many changes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm_ops import changes

ROOT = Path(__file__).parents[2]


def run_world(script: str, size: int, path: Path, seconds: float) -> list[tuple[int | None, str]]:
    """Run a worker script as `size` ranks; give exit codes and outputs, and leave nothing running."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    worker = str(Path(__file__).with_name(script))
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), str(size), str(path / "init")],
            **pipes, text=True, env=environment,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def check_values_and_gradients_of_many_changes(rank, world, folder):
    changes.check_all(rank)


@pytest.mark.distributed
@pytest.mark.timeout(180)
def test_values_and_gradients_of_many_changes_on_four_ranks(gloo_checks):
    failures = [
        report for report in gloo_checks(__file__, 4, 150)["check_values_and_gradients_of_many_changes"] if report
    ]
    assert not failures, "\n".join(failures)


@pytest.mark.distributed
@pytest.mark.timeout(90)
def test_a_dead_or_silent_peer_is_a_comm_error_and_no_hang(tmp_path):
    (code, output), *_ = run_world("worker_silence.py", 3, tmp_path, 60)
    assert code == 0, output[-3000:]


@pytest.mark.distributed
@pytest.mark.timeout(90)
def test_a_process_that_ends_waits_for_its_messages_under_way(tmp_path):
    results = run_world("worker_leaving.py", 2, tmp_path, 60)
    assert [code for code, _ in results] == [0, 0], "\n".join(output[-3000:] for _, output in results)
