"""Machines join a running job by torchrun, die and come back: parameters are those of one process without faults.

All workers start again then.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.launch.elastic import MARKS, alone, end_soon, started, total_of, without_end
from tests.ranks.machines import machines

pytestmark = [pytest.mark.distributed, *MARKS]


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
