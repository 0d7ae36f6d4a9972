"""A machine whose processes are killed is missed after two beats, for its connections end; one that is cut off is not.

Without its connections' end it would be missed after 100 s here, more than a test lasts.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks.machines import Machine, machines, refusal

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "none"),
]

SCRIPT = str(Path(__file__).with_name("suspicion_script.py"))
SECONDS = 90.0
CUT_SECONDS = 3.0  # ten beats


class Node:
    """A node at the rendezvous on a machine, and what it has said."""

    def __init__(self, machine: Machine, endpoints: str) -> None:
        self.lines: list[str] = []
        self.process = machine.start(sys.executable, "-u", SCRIPT, endpoints, HETU_FX_NODE=machine.hostname)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.strip() for line in self.process.stdout if line.startswith(("round", "suspects")))

    def until(self, said: str) -> None:
        """Wait for a line."""
        deadline = time.monotonic() + SECONDS
        while said not in self.lines:
            assert time.monotonic() < deadline, f"{said!r} was not said: {self.lines}"
            time.sleep(0.05)

    def kill(self) -> None:
        """End all processes of the machine."""
        self.process.kill()
        self.process.wait()


@contextmanager
def three_nodes(folder: Path, servers: int) -> Iterator[tuple[list[Machine], list[Node]]]:
    """Give three machines with a node each that have met, the first of which may serve; they are killed at the end."""
    with machines(folder, ["one", "two", "three"]) as three:
        nodes = [Node(machine, ",".join(one.address for one in three[:servers])) for machine in three]
        try:
            for node in nodes:
                node.until("round of 3")
            yield three, nodes
        finally:
            for node in nodes:
                node.kill()


def set_link(machine: Machine, state: str) -> None:
    subprocess.run(["ip", "-n", machine.namespace, "link", "set", "eth0", state], check=True, timeout=30)


def test_a_machine_that_dies_is_suspected_and_put_out_and_one_that_is_cut_off_for_a_while_is_not(
    tmp_path: Path,
) -> None:
    with three_nodes(tmp_path, servers=1) as (three, (first, second, third)):
        set_link(three[2], "down")
        time.sleep(CUT_SECONDS)
        set_link(three[2], "up")
        for node in (first, second):
            node.until("suspects []")
            assert node.lines[node.lines.index("round of 3") :] == ["round of 3", "suspects []"]
        third.kill()
        for node in (first, second):
            node.until("round of 2")


def test_the_machine_that_serves_the_rendezvous_dies_and_is_put_out_where_another_serves_it(tmp_path: Path) -> None:
    with three_nodes(tmp_path, servers=3) as (_, (first, second, third)):
        first.kill()
        for node in (second, third):
            node.until("round of 2")
