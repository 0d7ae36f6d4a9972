"""A job that goes on until it is told how many steps there are, on machines that come and go."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.agents import SECONDS, Agent
from tests.ranks.machines import Machine, refusal

MARKS = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "none"),
]

SCRIPT = str(Path(__file__).with_name("elastic_script.py"))
PAUSE_SECONDS = 0.1
MORE_STEPS = 20  # than any machine has done when it is told how many there are


@contextmanager
def started(
    three: list[Machine], nodes: str, servers: int = 1, agent: type[Agent] = Agent, *, steps: str
) -> Iterator[Callable[..., Agent]]:
    """Give what starts an agent on a machine, the first of which may serve; whatever is left at the end is killed."""
    agents: list[Agent] = []
    endpoints = ",".join(machine.address for machine in three[:servers])

    def start(number: int, nproc: int = 1) -> Agent:
        agents.append(agent(three[number], endpoints, nodes, [SCRIPT, steps, str(PAUSE_SECONDS)], nproc))
        return agents[-1]

    try:
        yield start
    finally:
        for one in agents:
            one.process.kill()
            one.process.wait()


@functools.cache
def alone(steps: int) -> float:
    """Return the sum of the parameters that one process ends with after so many steps."""
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, SCRIPT, str(steps), "0"]
    said = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
    return total_of(said)


def total_of(line: str) -> float:
    found = re.search(r"end (\S+)", line)
    assert found, line
    return float(found[1])


def without_end(folder: Path) -> Path:
    """Return a file for a number of steps that is not known yet."""
    file = folder / "steps"
    file.write_text(str(10**9))
    return file


def end_soon(file: Path, agent: Agent) -> int:
    """Write how many steps there are to be; return it."""
    last = max(agent.steps()) + MORE_STEPS
    file.with_suffix(".new").write_text(str(last))
    file.with_suffix(".new").rename(file)
    return last
