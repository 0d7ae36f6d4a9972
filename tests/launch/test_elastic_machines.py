"""Machines join a running job under torchrun, die and come back: parameters are those of one process without faults."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks.machines import Machine, machines, refusal

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "none"),
]

SCRIPT = str(Path(__file__).with_name("elastic_script.py"))
SECONDS = 120.0
STEPS, PAUSE_SECONDS = 120, 0.1


class Agent:
    """torchrun on a machine, and what it and its workers have said so far."""

    def __init__(self, machine: Machine, endpoints: str, nodes: str) -> None:
        command = ["-m", "torch.distributed.run", "--rdzv-backend", "hetu_fx", "--rdzv-endpoint", endpoints]
        command += ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "20", "--monitor-interval", "0.1"]
        self.lines: list[str] = []
        own = {"HETU_FX_NODE": machine.hostname, "HETU_FX_JOB": "elastic"}
        script = [SCRIPT, str(STEPS), str(PAUSE_SECONDS)]
        self.process = machine.start(sys.executable, "-u", *command, *script, **own)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line for line in self.process.stdout)

    def until(self, said: str) -> str:
        """Wait for a line; return it."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if re.search(said, line):
                    return line
            time.sleep(0.05)
        raise AssertionError(f"{said!r} was not said:\n{''.join(self.lines[-40:])}")

    def end(self) -> int:
        """Wait for its end; return its status."""
        return self.process.wait(SECONDS)


@contextmanager
def started(three: list[Machine], nodes: str, servers: int = 1) -> Iterator[Callable[[int], Agent]]:
    """Give what starts an agent on a machine, the first of which may serve; whatever is left at the end is killed."""
    agents: list[Agent] = []
    endpoints = ",".join(machine.address for machine in three[:servers])

    def start(number: int) -> Agent:
        agents.append(Agent(three[number], endpoints, nodes))
        return agents[-1]

    try:
        yield start
    finally:
        for agent in agents:
            agent.process.kill()
            agent.process.wait()


@functools.cache
def alone() -> float:
    """Return the sum of the parameters that one process ends with."""
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, SCRIPT, str(STEPS), "0"]
    said = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
    return total_of(said)


def total_of(line: str) -> float:
    found = re.search(r"end (\S+)", line)
    assert found, line
    return float(found[1])


def test_a_machine_joins_another_dies_and_comes_back_and_no_step_is_lost(tmp_path: Path) -> None:
    with machines(tmp_path, ["one", "two", "three"]) as three, started(three, "1:3") as start:
        first, second = start(0), start(1)
        first.until("step 10 of 2")
        third = start(2)
        third.until("start rank 2 of 3 at [1-9]")  # it goes on where the others are
        first.until("of 3$")
        second.process.kill()
        first.until("start rank 0 of 2 at [1-9].* from memory")
        back = start(1)
        back.until("start rank 2 of 3 at [1-9]")
        ends = [total_of(agent.until("end ")) for agent in (first, third, back)]
        assert [agent.end() for agent in (first, third, back)] == [0, 0, 0]
    expected = alone()
    assert ends == pytest.approx([expected] * 3, rel=1e-9)
    done = [int(step) for step in re.findall(r"step (\d+) of", "".join(first.lines))]
    assert sorted(set(done)) == list(range(1, STEPS + 1))


def test_the_machine_that_serves_the_rendezvous_dies_and_the_others_go_on_and_take_it_back(tmp_path: Path) -> None:
    with machines(tmp_path, ["one", "two", "three"]) as three, started(three, "1:3", servers=3) as start:
        first, second, third = start(0), start(1), start(2)
        second.until("step 10 of 3")
        first.process.kill()
        second.until("of 2$")
        back = start(0)
        back.until("start rank 2 of 3 at [1-9]")
        ends = [total_of(agent.until("end ")) for agent in (second, third, back)]
        assert [agent.end() for agent in (second, third, back)] == [0, 0, 0]
    assert ends == pytest.approx([alone()] * 3, rel=1e-9)


def test_a_machine_that_is_cut_off_says_so_and_the_others_go_on_without_it(tmp_path: Path) -> None:
    with machines(tmp_path, ["one", "two", "three"]) as three, started(three, "1:3", servers=3) as start:
        first, second, third = start(0), start(1), start(2)
        second.until("step 10 of 3")
        cut = ["ip", "-n", three[2].namespace, "link", "set", "eth0", "down"]
        subprocess.run(cut, check=True, timeout=30)
        third.until("the rendezvous at .* is gone: no answer")
        ends = [total_of(agent.until("end ")) for agent in (first, second)]
        assert [agent.end() for agent in (first, second)] == [0, 0]
        assert not any("of 1" in line for line in third.lines)
        third.until("still waiting for a round of the job")
    assert ends == pytest.approx([alone()] * 2, rel=1e-9)
