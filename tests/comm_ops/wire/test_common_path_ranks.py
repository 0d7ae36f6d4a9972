"""Processes that end early, in every way: the others raise an error that says who has left, and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from tests.ranks.stepping import WORLD, watched

SECONDS = 100.0


def leave(how: str) -> None:
    """End this process."""
    if how == "exit":
        sys.exit(0)
    if how == "raise":
        raise ValueError("a bad sample")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def work(how: str) -> None:
    """Train three steps; rank 1 leaves after the first, or has fewer batches."""
    model, x = watched()
    rank = int(os.environ["RANK"])
    for step in range(2 if rank == 1 and how == "fewer" else 3):
        if rank == 1 and step == 1:
            leave(how)
        model(x).loss.backward()


def run(how: str, launcher: Sequence[str] = ()) -> list[tuple[int, str]]:
    """Run `work` on every rank, or by a launcher; return how each process ended, and what it has written."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(WORLD)}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    commands = [[sys.executable, *launcher]] if launcher else [[sys.executable, *_module(how)]] * WORLD
    started = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank, command in enumerate(commands)
    ]
    try:
        return [(process.returncode, text) for process in started for text in [process.communicate(timeout=SECONDS)[1]]]
    finally:
        for process in started:
            process.kill()


def _module(how: str) -> list[str]:
    return ["-m", __name__, how]


LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", *_module("fewer")],
    "hetu-fx launch": ["-m", "hetu_fx.cli", "launch", f"--nproc={WORLD}", "--", __file__, "exit"],
}
REASONS = {
    "exit": "rank 1: has left the program; its last call was",
    "fewer": "rank 1: has left the program; its last call was",
    "raise": "rank 1: has left the program (ValueError: a bad sample, at test_common_path_ranks.py:",
    "kill": "rank 1: has given no sign of life",
}


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", list(REASONS))
def test_who_is_left_says_who_has_left(how: str) -> None:
    (code, told), _ = run(how)
    assert code == 1
    assert REASONS[how] in told
    assert "hetu_fx.errors.DivergedError" in told


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_under_launchers_too(launcher: str) -> None:
    ((code, told),) = run("by a launcher", LAUNCHERS[launcher])
    assert code == 1
    assert REASONS["fewer"] in told


if __name__ == "__main__":
    work(sys.argv[1])
