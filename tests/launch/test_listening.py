"""A job of one machine listens at its loopback alone, a process without others nowhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spawned import run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).with_name("listening_script.py"))
STARTS = {
    "hetu-fx launch": ("-m", "hetu_fx.cli", "launch", "--nproc", "2", "--"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),  # but for its agent
}


def said(*start: str) -> dict[str, Any]:
    status, output = run(sys.executable, *start, SCRIPT, seconds=240)
    assert status == 0, output
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_job_of_one_machine_listens_at_the_loopback_alone(start: tuple[str, ...]) -> None:
    told = said(*start)
    assert told["processes"] >= 2
    assert set(told["addresses"]) == {"127.0.0.1"}


def test_a_process_alone_listens_nowhere() -> None:
    assert said() == {"processes": 1, "addresses": []}
