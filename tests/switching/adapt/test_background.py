"""What is done beside this process: its result, its errors, its end; nothing here waits for a fixed time."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetu_fx.errors import PlanError, StateError
from hetu_fx.switching.adapt import replanning as module
from hetu_fx.switching.adapt.replanning import Background, limit_cores


def finished(background: Background[Any, Any]) -> Background[Any, Any]:
    """Wait until the question is answered."""
    while not background.is_done:
        time.sleep(0.001)
    return background


def asked(answer: Callable[[Any], Any], question: object = None) -> Background[Any, Any]:
    """Start a process and ask it something."""
    background = Background(answer)
    background.ask(question)
    return background


def wait_for(path: Path) -> int:
    """Wait until a file is there; tell which process has."""
    while not path.exists():
        time.sleep(0.001)
    return os.getpid()


def test_this_process_goes_on_until_the_other_is_done(tmp_path: Path) -> None:
    background = asked(wait_for, tmp_path / "go")
    assert not background.is_done
    (tmp_path / "go").touch()
    assert finished(background).result() != os.getpid()


def test_one_process_answers_question_after_question() -> None:
    background: Background[int, tuple[int, int]] = Background(lambda number: (os.getpid(), number + 1))
    answers = []
    for number in range(3):
        background.ask(number)
        answers.append(finished(background).result())
    assert [number for _, number in answers] == [1, 2, 3]
    assert len({process for process, _ in answers}) == 1


def test_a_question_after_one_that_failed_is_answered() -> None:
    background: Background[int, float] = Background(lambda number: 1 / number)
    background.ask(0)
    with pytest.raises(StateError, match="ZeroDivisionError"):
        finished(background).result()
    background.ask(4)
    assert finished(background).result() == 0.25


def test_a_result_larger_than_a_pipe_arrives_whole() -> None:
    assert finished(asked(bytes, 1_000_000)).result() == bytes(1_000_000)


def test_an_error_of_ours_is_raised_as_it_was() -> None:
    def fail(_: None) -> None:
        raise PlanError("no plan fits")

    with pytest.raises(PlanError, match=r"^no plan fits$"):
        finished(asked(fail)).result()


def test_what_cannot_be_written_down_is_an_error() -> None:
    with pytest.raises(StateError, match="pickle"):
        finished(asked(lambda _: threading.Lock())).result()


def test_a_process_that_is_killed_is_told_of() -> None:
    background = asked(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(StateError, match="ended without a word"):
        finished(background).result()
    assert background.is_gone


def test_a_process_that_has_ended_before_it_is_asked_is_told_of() -> None:
    before = set(own_children())
    background: Background[int, int] = Background(abs)
    assert not background.is_gone
    (child,) = set(own_children()) - before
    os.kill(int(child), signal.SIGKILL)
    while not background.is_gone:
        time.sleep(0.001)
    background.ask(-1)
    with pytest.raises(StateError, match="ended without a word"):
        finished(background).result()


def test_a_process_that_cannot_be_started_is_an_answer_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    background = asked(abs, 1)
    assert background.is_done
    assert background.is_gone
    with pytest.raises(StateError, match=r"no process could be started: .*temporarily unavailable"):
        background.result()


def test_a_process_that_is_stopped_or_forgotten_is_gone(tmp_path: Path) -> None:
    before = set(own_children())
    for ends in (Background.stop, lambda background: None):
        background = asked(wait_for, tmp_path / "never")
        assert len(set(own_children()) - before) == 1
        ends(background)
        del background
        assert set(own_children()) <= before


def test_the_process_has_none_of_the_parents_connections() -> None:
    reader, writer = os.pipe()

    def can_write(_: None) -> bool:
        try:
            return os.write(writer, b"x") == 1
        except OSError:
            return False

    assert finished(asked(can_write)).result() is False
    os.close(reader)
    os.close(writer)


def test_a_paced_process_takes_its_part_of_the_time_and_no_more() -> None:
    def shares(cores: float) -> tuple[float, float]:
        start, used = time.monotonic(), time.process_time()
        with limit_cores(cores):
            while time.process_time() - used < 0.1:
                pass
            return time.process_time() - used, time.monotonic() - start

    for cores in (0.5, 0.25):
        on_core, elapsed = finished(asked(shares, cores)).result()
        assert elapsed > 0.8 * on_core / cores  # a machine that is busy makes it longer, nothing makes it shorter


def own_children() -> list[str]:
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()


def test_a_process_that_has_got_the_number_of_one_that_is_gone_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(own_children())
    background = asked(wait_for, Path("/never/there"))
    (child,) = set(own_children()) - before
    with monkeypatch.context() as patched:
        patched.setattr(module, "start_time", lambda process: 1)  # not when the child was started
        background.stop()
    assert child in own_children()  # nobody has waited for it
    os.kill(int(child), signal.SIGKILL)
    assert os.waitpid(int(child), 0)[0] == int(child)


def test_the_process_ends_with_its_parent_however_that_ends() -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        background = asked(wait_for, Path("/never/there"))
        os.write(writer, b" ".join(child.encode() for child in own_children()))  # a fork has no other children
        os.kill(os.getpid(), signal.SIGKILL)
        background.stop()
    os.waitpid(parent, 0)
    os.close(writer)
    with os.fdopen(reader) as told:
        status = Path(f"/proc/{told.read()}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
