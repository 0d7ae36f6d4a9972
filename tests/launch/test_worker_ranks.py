"""Workers that wait for one that lives and does not come: their waits end once another one is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

WORLD = 3


def work() -> None:
    """Start 0: rank 2 is killed, rank 1 stays in its own code, and rank 0 waits for both, first of all for rank 1."""
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
    match os.environ["RANK"]:
        case "2":
            os.kill(os.getpid(), signal.SIGKILL)
        case "1":
            threading.Event().wait()
    model(x)


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_who_waits_for_one_that_lives_is_told_of_one_that_is_lost(tmp_path: Path) -> None:
    events = tmp_path / "events"
    options = [f"--nproc={WORLD}", "--min-nproc=1", "--grace=1", f"--events={events}"]
    command = [sys.executable, "-m", "hetu_fx.cli", "launch", *options, "--", __file__]
    ended = subprocess.run(command, timeout=200, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in events.read_text().splitlines()]
    (stopped,) = [event for event in told if event["event"] == "stopped"]
    assert stopped["rank"] == 0
    assert "communication has been ended: rank 2 (process" in stopped["reason"]
    assert len([event for event in told if event["event"] == "start"][-1]["workers"]) == 1


if __name__ == "__main__":
    work()
