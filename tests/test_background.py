"""What is done beside this process: its result, its errors, its end; nothing here waits for a fixed time."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hetu_fx.background import Background
from hetu_fx.errors import PlanError, StateError


def finished(background: Background[object]) -> Background[object]:
    """Wait until all has been told."""
    while not background.is_done:
        time.sleep(0.001)
    return background


def wait_for(path: Path) -> int:
    """Wait until a file is there; tell which process has."""
    while not path.exists():
        time.sleep(0.001)
    return os.getpid()


def test_this_process_goes_on_until_the_other_is_done(tmp_path: Path) -> None:
    background = Background(lambda: wait_for(tmp_path / "go"))
    assert not background.is_done
    (tmp_path / "go").touch()
    assert finished(background).result() != os.getpid()


def test_a_result_larger_than_a_pipe_arrives_whole() -> None:
    assert finished(Background(lambda: b"x" * 1_000_000)).result() == b"x" * 1_000_000


def test_an_error_is_told_with_its_kind() -> None:
    def fail() -> None:
        raise PlanError("no plan fits")

    with pytest.raises(StateError, match="PlanError: no plan fits"):
        finished(Background(fail)).result()


def test_what_cannot_be_written_down_is_an_error() -> None:
    with pytest.raises(StateError, match="pickle"):
        finished(Background(threading.Lock)).result()


def test_a_process_that_is_killed_is_told_of() -> None:
    with pytest.raises(StateError, match="ended without a word"):
        finished(Background(lambda: os.kill(os.getpid(), signal.SIGKILL))).result()


def test_a_process_that_cannot_be_started_is_an_act_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    background = Background(lambda: 1)
    assert background.is_done
    with pytest.raises(StateError, match=r"no process could be started: .*temporarily unavailable"):
        background.result()


def test_a_process_that_is_stopped_or_forgotten_is_gone(tmp_path: Path) -> None:
    before = set(own_children())
    for ends in (Background.stop, lambda background: None):
        background = Background(lambda: wait_for(tmp_path / "never"))
        assert len(set(own_children()) - before) == 1
        ends(background)
        del background
        assert set(own_children()) <= before


def test_the_process_has_none_of_the_parents_connections() -> None:
    reader, writer = os.pipe()

    def can_write() -> bool:
        try:
            return os.write(writer, b"x") == 1
        except OSError:
            return False

    assert finished(Background(can_write)).result() is False
    os.close(reader)
    os.close(writer)


def own_children() -> list[str]:
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()


def test_the_process_ends_with_its_parent_however_that_ends() -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        background = Background(lambda: wait_for(Path("/never/there")))
        os.write(writer, b" ".join(child.encode() for child in own_children()))  # a fork has no other children
        os.kill(os.getpid(), signal.SIGKILL)
        background.stop()
    os.waitpid(parent, 0)
    os.close(writer)
    with os.fdopen(reader) as told:
        status = Path(f"/proc/{told.read()}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
