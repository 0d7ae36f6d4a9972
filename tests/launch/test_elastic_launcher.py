"""Machines join a running job by `hetu-fx launch`, die, leave and come back: workers stay in their processes.

Parameters are those of one process without faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.agents import Launcher
from tests.launch.elastic import MARKS, alone, end_soon, started, total_of, without_end
from tests.ranks.machines import machines

pytestmark = [pytest.mark.distributed, *MARKS]


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
        assert second.steps() == list(range(1, len(second.steps()) + 1))
        first.terminate()  # which serves the rendezvous
        assert first.end() == 0
        second.until("step .* of 1$")
        last = end_soon(file, second)
        assert total_of(second.until("end ")) == pytest.approx(alone(last), rel=1e-9)
        assert second.end() == 0
        assert not any("others keep running" in line for agent in (first, second, third) for line in agent.lines)
    assert sorted({*second.steps()}) == list(range(1, last + 1))
    assert len(second.processes()) == 1
