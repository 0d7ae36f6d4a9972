"""A job of `accelerate launch` whose ranks leave in every way: each time all end, it is said why, and it goes on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetu_fx.checkpoint.snapshot_files import read_name
from tests.chaos_machine import SharedMemory
from tests.ranks.stepping import WORLD, watched

SECONDS = 120.0
TOLD = {
    "raise": "OSError: the rows of rank 1 cannot be read",
    "exit": "rank 1: has left the program; its last call was",
    "kill": "failed (exitcode: -9) local_rank: 1",
    "the launcher is told to end": "death signal",
}
"""What is said of each fault, in the order of the starts."""
STORE_PER_START = {"PET_STANDALONE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Accelerator() has gloo meet in the launcher's store, where the addresses of the start before are, unless so told."""


def work(folder: Path) -> None:
    """Go on where the start before was, train a step and keep it; then rank 1 leaves, and rank 0 waits for it."""
    import torch
    from accelerate import Accelerator

    accelerator, start = Accelerator(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, x = watched()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    snapshots = model.hetu.snapshots(optimizer)
    assert snapshots.resume().step == start
    accelerator.backward(model(x).loss)
    optimizer.step()
    snapshots.step()
    snapshots.wait()
    (folder / f"rank{accelerator.process_index}_{start}").write_text(str(os.getpid()))
    while not (folder / f"go_{start}").exists():
        time.sleep(0.05)
    if accelerator.process_index == 1:
        leave([*TOLD][start])
    model(x)


def leave(fault: str) -> None:
    """End this process, or do nothing until it is ended."""
    match fault:
        case "raise":
            raise OSError("the rows of rank 1 cannot be read")
        case "exit":
            sys.exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SECONDS)


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_ranks_that_leave_are_told_of_and_no_process_and_nothing_torn_stays(tmp_path: Path) -> None:
    options = ["--multi_gpu", "--num_machines", "1", "--num_processes", str(WORLD), "--max_restarts", str(len(TOLD))]
    module = [sys.executable, "-m", "accelerate.commands.launch", *options, "--module", __name__, str(tmp_path)]
    environment = {**os.environ, **STORE_PER_START, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    output = tmp_path / "output"
    with output.open("w") as file:
        command = [*SharedMemory().command(), *module]
        launcher = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        for start, fault in enumerate(TOLD):
            ranks = [os.pidfd_open(number_in(tmp_path / f"rank{rank}_{start}", launcher)) for rank in range(WORLD)]
            memory = os.open(f"/proc/{launcher.pid}/root/dev/shm", os.O_RDONLY)  # there as long as it is open
            (tmp_path / f"go_{start}").touch()
            if "launcher" in fault:
                launcher.terminate()
            for rank in ranks:
                assert select.select([rank], [], [], SECONDS)[0], fault  # readable once the process has ended
        assert launcher.wait(SECONDS) != 0
    except BaseException:
        print(output.read_text())
        raise
    finally:
        launcher.kill()
    assert [fault for fault, told in TOLD.items() if told not in output.read_text()] == []
    if not SharedMemory().refusal:
        check_memory(Path(f"/proc/self/fd/{memory}"), step=len(TOLD))


def number_in(path: Path, launcher: subprocess.Popen[bytes]) -> int:
    """Return the number in a file, once it is there."""
    deadline = time.monotonic() + SECONDS
    while not path.exists() or not path.read_text():
        assert launcher.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(path.read_text())


def check_memory(folder: Path, step: int) -> None:
    """Check that a job's shared memory has one whole snapshot, which its next start goes on from, and nothing else."""
    assert not [*folder.rglob(".writing-*")]
    found = [path for path in folder.rglob("*") if path.is_file() and ".used-by-" not in path.name]
    parts = [read_name(path.name) for path in found]
    assert None not in parts, found
    assert {(part.moment.step, part.owner) for part in parts if part} == {(step, rank) for rank in range(WORLD)}


if __name__ == "__main__":
    work(Path(sys.argv[1]))
