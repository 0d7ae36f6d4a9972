"""Workers that wait for one that does not come, whatever it is that holds it: their waits end, and so does the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

WORLD = 3


def a_peer_is_killed() -> None:
    """Lose rank 2; rank 1 stays in its own code, and rank 0 waits for both, first of all for rank 1."""
    match os.environ["RANK"]:
        case "2":
            os.kill(os.getpid(), signal.SIGKILL)
        case "1":
            threading.Event().wait()


def a_loader_fails() -> None:
    """Have a worker of rank 2's DataLoader raise."""
    from torch.utils.data import DataLoader

    if os.environ["RANK"] == "2":
        next(iter(DataLoader(BadSamples(), num_workers=1)))


class BadSamples:
    """A dataset whose samples cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        raise OSError(f"sample {index} cannot be read")


def work(fault: str) -> None:
    """Do so in the first start; the ranks that come through it call the model together."""
    import torch
    from torch import nn

    import hetu_fx

    if os.environ["HETU_FX_START"] != "0":
        return
    model, x = nn.Linear(4, 3), torch.zeros(4, 4)
    model = hetu_fx.auto_parallelize(
        model,
        (x,),
        plan=hetu_fx.Plan.data_parallel(range(WORLD)),
        loss_fn=lambda output, input: output.pow(2).mean(),
    )
    globals()[fault]()
    model(x)


def launched(folder: Path, fault: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run a job; return how it ended, and the events that it told."""
    events = folder / "events"
    options = [f"--nproc={WORLD}", "--min-nproc=1", "--grace=1", f"--events={events}"]
    command = [sys.executable, "-m", "hetu_fx.cli", "launch", *options, "--", __file__, fault]
    ended = subprocess.run(command, timeout=200, capture_output=True, text=True, check=False)
    return ended, [json.loads(line) for line in events.read_text().splitlines()]


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_who_waits_for_one_that_lives_is_told_of_one_that_is_lost(tmp_path: Path) -> None:
    ended, told = launched(tmp_path, a_peer_is_killed.__name__)
    assert ended.returncode == 0, ended.stderr
    (stopped,) = [event for event in told if event["event"] == "stopped"]
    assert stopped["rank"] == 0
    assert "communication has been ended: rank 2 (process" in stopped["reason"]
    assert len([event for event in told if event["event"] == "start"][-1]["workers"]) == 1


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_an_error_of_a_data_loaders_worker_ends_the_job_and_is_said(tmp_path: Path) -> None:
    ended, told = launched(tmp_path, a_loader_fails.__name__)
    assert ended.returncode == 1
    assert "OSError: sample 0 cannot be read" in ended.stderr
    assert len([event for event in told if event["event"] == "start"]) == 1


if __name__ == "__main__":
    work(sys.argv[1])
