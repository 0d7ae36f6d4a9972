"""Of a process that is gone one hears before it has ended."""

from __future__ import annotations

import os
import signal

import pytest

from hetu_fx.launch.job import LivenessLock

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
