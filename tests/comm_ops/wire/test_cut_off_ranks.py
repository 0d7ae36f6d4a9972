"""A process that cannot reach the job's store says so, and ends with a status of its own if it waits for others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks.stepping import WORLD, watched

SECONDS = 150.0
SERVE = (
    "import sys, torch.distributed as dist;"
    "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
    "print(store.port, flush=True); sys.stdin.read()"
)


def work(folder: Path) -> None:
    """Take a step; once the store does not answer any more, rank 0 waits for rank 1, which has work of its own."""
    model, x = watched()
    rank = os.environ["RANK"]
    model(x).loss.backward()
    (folder / f"ready{rank}").touch()
    while not (folder / "cut").exists():
        time.sleep(0.05)
    if rank == "0":
        model(x)
    time.sleep(600)


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_who_waits_and_cannot_reach_the_store_says_so_and_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(WORLD)}
        environment |= {
            "MASTER_PORT": server.stdout.readline().decode().strip(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        command = [sys.executable, "-m", __name__, str(tmp_path)]
        started = [
            subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
            for rank in range(WORLD)
        ]
        try:
            deadline = time.monotonic() + SECONDS
            while len([*tmp_path.glob("ready*")]) < WORLD:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            server.send_signal(signal.SIGSTOP)  # as where the network is cut: nothing comes back, and no error
            (tmp_path / "cut").touch()
            told = started[0].communicate(timeout=SECONDS)[1]
            assert started[0].returncode == os.EX_TEMPFAIL
            assert "cannot reach the job's store at 127.0.0.1:" in told
            assert "CommError: rank 0: communication has been ended: the job's store at 127.0.0.1:" in told
            assert started[1].poll() is None  # it needs nobody
        finally:
            for process in (*started, server):
                process.kill()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
