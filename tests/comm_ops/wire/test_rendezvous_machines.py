"""Ranks on several machines meet whatever their names stand for, or say within 30 s which addresses do not meet."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hetu_fx.base.addresses import VARIABLE
from tests.ranks.machines import Machine, machines, refusal

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "none"),
]

SCRIPT = str(Path(__file__).with_name("meeting_script.py"))
SECONDS = 120.0


def said(ranks: Sequence[Machine], host: str) -> list[dict[str, Any]]:
    """Run the script as a rank on each machine; return what each printed last."""
    world = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": host, "MASTER_PORT": "29400"}
    started = [machine.start(sys.executable, SCRIPT, **world, RANK=str(rank)) for rank, machine in enumerate(ranks)]
    try:
        printed = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads(text.strip().splitlines()[-1]) for text in printed]


def test_machines_of_one_hostname_meet_where_their_names_stand_for_the_loopback(tmp_path: Path) -> None:
    debian = {0: "127.0.1.1 vm\n10.77.0.1 first", 1: "127.0.1.1 vm\n10.77.0.1 first"}
    with machines(tmp_path, ["vm", "vm"], {**debian, 0: "127.0.1.1 vm first"}) as two:
        told = said([two[0], two[1], two[1]], "first")
    assert [one["sum"] for one in told] == [3.0] * 3
    assert [one["read"] for one in told] == [[1] * 4, [2] * 4, [0] * 4]
    # Processes of one machine are started apart here, each with a namespace of processes of its own.
    assert told[0]["addresses"] == ["10.77.0.1", "10.77.0.2", "10.77.0.2"]
    assert told[0]["nodes"] == 3
    assert len(set(told[0]["shown"])) == 3


def test_machines_that_do_not_reach_each_other_say_so_at_once_on_all_ranks(tmp_path: Path) -> None:
    with machines(tmp_path, ["one", "two", "three"]) as three:
        wall = "ip route add unreachable 10.77.0.3".split()  # from the second to the third; both reach the first
        subprocess.run(["ip", "netns", "exec", three[1].namespace, *wall], check=True, timeout=30)
        told = said(three, three[0].address)
    for one in told:
        assert "rank 1 at 10.77.0.2 cannot reach rank 2 at 10.77.0.3" in one["error"]
        assert VARIABLE in one["error"]
        assert one["seconds"] < 60.0  # half a minute, and as much where the machine has other work
