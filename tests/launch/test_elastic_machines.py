"""Machines join a running job, die, leave and come back: parameters are those of one process without faults.

By torchrun, which starts all workers again then, and by `hetu-fx launch`, whose workers stay in their processes.
"""

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

from tests.launch.agents import SECONDS, Agent, Launcher
from tests.ranks.machines import Machine, machines, refusal

pytestmark = [
    pytest.mark.distributed,
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


def test_a_machine_joins_another_dies_and_comes_back_and_no_step_is_lost(tmp_path: Path) -> None:
    file = without_end(tmp_path)
    with machines(tmp_path, ["one", "two", "three"]) as three, started(three, "1:3", steps=str(file)) as start:
        first, second = start(0), start(1)
        first.until("step 10 of 2")
        third = start(2)
        third.until("start rank 2 of 3 at [1-9]")  # it goes on where the others are
        first.until("of 3$")
        second.process.kill()
        first.until("start rank 0 of 2 at [1-9].* from memory")
        back = start(1)
        back.until("start rank 2 of 3 at [1-9]")
        last = end_soon(file, first)
        ends = [total_of(agent.until("end ")) for agent in (first, third, back)]
        assert [agent.end() for agent in (first, third, back)] == [0, 0, 0]
    assert ends == pytest.approx([alone(last)] * 3, rel=1e-9)
    assert sorted({*first.steps()}) == list(range(1, last + 1))


def test_the_machine_that_serves_the_rendezvous_dies_and_the_others_go_on_and_take_it_back(tmp_path: Path) -> None:
    file = without_end(tmp_path)
    with (
        machines(tmp_path, ["one", "two", "three"]) as three,
        started(three, "1:3", servers=3, steps=str(file)) as start,
    ):
        first, second, third = start(0), start(1), start(2)
        second.until("step 10 of 3")
        first.process.kill()
        second.until("of 2$")
        back = start(0)
        back.until("start rank 2 of 3 at [1-9]")
        last = end_soon(file, second)
        ends = [total_of(agent.until("end ")) for agent in (second, third, back)]
        assert [agent.end() for agent in (second, third, back)] == [0, 0, 0]
    assert ends == pytest.approx([alone(last)] * 3, rel=1e-9)


def test_a_machine_that_is_cut_off_says_so_and_the_others_go_on_without_it(tmp_path: Path) -> None:
    file = without_end(tmp_path)
    with (
        machines(tmp_path, ["one", "two", "three"]) as three,
        started(three, "1:3", servers=3, steps=str(file)) as start,
    ):
        first, second, third = start(0), start(1), start(2)
        second.until("step 10 of 3")
        cut = ["ip", "-n", three[2].namespace, "link", "set", "eth0", "down"]
        subprocess.run(cut, check=True, timeout=30)
        third.until("the rendezvous at .* is gone: no answer")
        first.until("step .* of 2$")
        last = end_soon(file, first)
        ends = [total_of(agent.until("end ")) for agent in (first, second)]
        assert [agent.end() for agent in (first, second)] == [0, 0]
        assert not any("of 1" in line for line in third.lines)
        third.until("still waiting for a round of the job")
    assert ends == pytest.approx([alone(last)] * 2, rel=1e-9)


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


def test_under_the_launcher_unequal_machines_join_and_come_back_and_the_others_stay_in_their_processes(
    tmp_path: Path,
) -> None:
    file = without_end(tmp_path)
    with (
        machines(tmp_path, ["one", "two", "three"]) as three,
        started(three, "1:3", agent=Launcher, steps=str(file)) as start,
    ):
        first, second = start(0), start(1)
        first.until("step .* of 2$")
        third = start(2, nproc=2)
        third.until("start rank [23] of 4 at [1-9]")
        first.until("step .* of 4$")
        third.process.kill()
        first.until(r"machines \['three'\] are gone")
        first.until("start rank . of 2 at [1-9].* from memory")
        back = start(2, nproc=2)
        back.until("step .* of 4$")
        last = end_soon(file, first)
        ends = [total_of(agent.until("end ")) for agent in (first, second, back)]
        assert [agent.end() for agent in (first, second, back)] == [0, 0, 0]
    assert ends == pytest.approx([alone(last)] * 3, rel=1e-9)
    assert sorted({*first.steps(), *second.steps()}) == list(range(1, last + 1))
    assert [len(agent.processes()) for agent in (first, second, third, back)] == [1, 1, 2, 2]


def test_under_the_launcher_a_machine_that_is_told_to_end_leaves_at_a_steps_end(tmp_path: Path) -> None:
    file = without_end(tmp_path)
    with (
        machines(tmp_path, ["one", "two", "three"]) as three,
        started(three, "1:3", servers=3, agent=Launcher, steps=str(file)) as start,
    ):
        first, second, third = start(0), start(1), start(2)
        second.until("step .* of 3$")
        third.terminate()
        assert third.end() == 0
        second.until("step .* of 2$")
        assert not any("others keep running" in line for agent in (first, second, third) for line in agent.lines)
        assert second.steps() == list(range(1, len(second.steps()) + 1))
        first.terminate()  # which serves the rendezvous
        assert first.end() == 0
        second.until("step .* of 1$")
        last = end_soon(file, second)
        assert total_of(second.until("end ")) == pytest.approx(alone(last), rel=1e-9)
        assert second.end() == 0
    assert sorted({*second.steps()}) == list(range(1, last + 1))
    assert len(second.processes()) == 1
