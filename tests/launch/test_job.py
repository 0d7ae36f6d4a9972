"""Of a process that is gone one hears before it has ended."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from hetu_fx.launch.job import LaunchSpec, LivenessLock, MessageChannel, NodesSpec, WorkerProcess, verdicts

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def hold_in_a_child(life: LivenessLock) -> int:
    """Fork a process that holds it; returns once it does."""
    told, tell = os.pipe()
    process = os.fork()
    if not process:
        life.hold()
        os.write(tell, b"x")
        signal.pause()
    os.read(told, 1)
    os.close(told)
    os.close(tell)
    return process


def test_what_nobody_has_held_is_not_gone() -> None:
    assert not LivenessLock().is_gone


def test_who_is_killed_is_gone() -> None:
    life = LivenessLock()
    process = hold_in_a_child(life)
    assert not life.is_gone
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert life.is_gone


@pytest.mark.parametrize(
    ("nodes", "ended"), [(None, [1, 2]), (NodesSpec(1, 2, "one"), [])], ids=["this machine", "two machines"]
)
def test_where_all_wait_all_are_ended_unless_the_one_that_does_not_come_may_be_elsewhere(
    nodes: NodesSpec | None, ended: list[int]
) -> None:
    here, there = socket.socketpair()
    with here, there:
        workers = [
            WorkerProcess(number, -1, MessageChannel(here), LivenessLock(), 0.0, "running", rank, ("sum", 700.0))
            for rank, number in enumerate((1, 2))
        ]
        spec = LaunchSpec(("script.py",), 2, 2, nodes=nodes)
        assert [worker.process for worker, _ in verdicts(workers, spec, 0.0, None)] == ended
        workers[1].wait = None
        assert [worker.process for worker, _ in verdicts(workers, spec, 0.0, None)] == [2]
