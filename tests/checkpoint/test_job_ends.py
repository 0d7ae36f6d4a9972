"""A job that is told to end saves between two steps, ends well, and goes on as if it had never ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import hetu_fx
from hetu_fx.base.machine import start_time
from hetu_fx.checkpoint import job_ends
from hetu_fx.checkpoint.job_ends import LEFT, HeartbeatAges, Heartbeats, Peer, ranks_watched_by, watch_each_other
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from tests.checkpoint.signal_script import Net, batch
from tests.spawned import free_port, run

BOUND = 0.2


@pytest.fixture
def silent() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that never gives a sign."""
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield process
        process.kill()


def test_only_new_signs_break_a_silence() -> None:
    silences = HeartbeatAges((1, 2, 3, 4))
    for number in range(3):
        silences.hear({1: str(number), 2: "7", 3: LEFT}, 1.0)
    assert silences.longer_than(1.5) == (2, 4)  # 4 has never given one
    assert silences.longer_than(2.5) == (4,)


@pytest.mark.parametrize(
    ("nodes", "watched"),
    [("aa", [(1,), (0,)]), ("ab", [(1,), (0,)]), ("aabb", [(1,), (0, 2), (3,), (0, 2)]), ("a", [()])],
)
def test_everyone_watches_its_node_and_the_next_rank(nodes: str, watched: list[tuple[int, ...]]) -> None:
    assert [ranks_watched_by(rank, nodes) for rank in range(len(nodes))] == watched


OWN = Peer("here", os.getpid(), start_time(os.getpid()))


def peer_of(process: int) -> Peer:
    return Peer("here", process, start_time(process))


def test_a_process_is_not_taken_for_another_one_of_its_number(silent: subprocess.Popen[bytes]) -> None:
    other = replace(peer_of(silent.pid), started=1)
    gone = replace(OWN, process=2**22 + 1)  # above the system's highest
    assert other.opened() is None
    assert gone.opened() is None
    Heartbeats(HashStore(), 0, [OWN, other, gone], BOUND).close()


def test_a_silent_process_of_this_node_is_ended(silent: subprocess.Popen[bytes]) -> None:
    beats = Heartbeats(HashStore(), 0, [OWN, peer_of(silent.pid)], BOUND)
    try:
        assert silent.wait(timeout=120) == -signal.SIGKILL
    finally:
        beats.close()


def test_what_another_has_found_holds_for_all(silent: subprocess.Popen[bytes]) -> None:
    store = HashStore()
    store.set("lost", "1")
    store.set("beat/1", LEFT)  # to this one it is not silent
    beats = Heartbeats(store, 0, [OWN, peer_of(silent.pid)], BOUND)
    try:
        assert silent.wait(timeout=120) == -signal.SIGKILL
    finally:
        beats.close()


def test_who_has_closed_has_left() -> None:
    store = HashStore()
    Heartbeats(store, 0, [OWN], BOUND).close()
    assert store.get("beat/0").decode() == LEFT


def test_nobody_is_watched_where_there_is_nobody_else() -> None:
    assert watch_each_other(GroupTable.dry(0, 1), BOUND) is None


def test_a_bound_that_cannot_be_is_refused() -> None:
    with pytest.raises(StateError, match="stopped_after=0 must be above 0 seconds"):
        watch_each_other(GroupTable.dry(0, 1), 0.0)


SCRIPT = str(Path(__file__).with_name("signal_script.py"))
SECONDS = 120
LONG = 3000  # steps: a job that only a signal ends in time


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Put back what a test has left."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def made() -> tuple[Any, torch.optim.Optimizer]:
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hetu_fx.auto_parallelize(model, batch(0), plan=hetu_fx.Plan.single(0)), optimizer


def tell(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_a_step_that_has_begun_is_finished_first(tmp_path: Path) -> None:
    model, optimizer = made()
    model.hetu.save_on_signal(tmp_path / "stopped", optimizer=optimizer, extra=lambda: {"done": 1})
    model(**batch(0)).backward()
    tell()
    model(**batch(1)).backward()
    assert not (tmp_path / "stopped").exists()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(**batch(2))
    assert not (tmp_path / "stopped").exists()
    with pytest.raises(SystemExit) as left:
        model(**batch(2))
    assert left.value.code == 0
    other, its_optimizer = made()
    assert other.hetu.load(tmp_path / "stopped", optimizer=its_optimizer) == {"done": 1}
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)


def test_the_handler_of_before_is_called_once_the_checkpoint_is_there_and_put_back(tmp_path: Path) -> None:
    model, optimizer = made()
    seen: list[bool] = []

    def own(number: int, frame: object) -> None:
        seen.append((tmp_path / "stopped").is_dir())

    signal.signal(signal.SIGUSR1, own)
    both = (signal.SIGTERM, signal.SIGUSR1)
    model.hetu.save_on_signal(tmp_path / "stopped", optimizer=optimizer, signals=both, status=143)
    tell(signal.SIGUSR1)
    with pytest.raises(SystemExit) as left:
        model(**batch(0))
    assert left.value.code == 143
    assert seen == [True]
    assert signal.getsignal(signal.SIGUSR1) is own


def test_a_second_signal_does_at_once_what_it_did_before_but_for_an_echo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    model.hetu.save_on_signal(tmp_path / "stopped", optimizer=optimizer)
    tell()
    tell()
    assert heard == []
    monkeypatch.setattr(job_ends, "SAME_SECONDS", 0.0)
    tell()
    assert heard == [signal.SIGTERM]
    model(**batch(0)).backward()  # nobody listens any more
    assert not (tmp_path / "stopped").exists()


def test_another_thread_than_the_main_one_is_refused(tmp_path: Path) -> None:
    model, optimizer = made()
    problems: list[StateError] = []

    def listen() -> None:
        with pytest.raises(StateError, match="in the main thread") as raised:
            model.hetu.save_on_signal(tmp_path / "stopped", optimizer=optimizer)
        problems.append(raised.value)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert len(problems) == 1


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
LAUNCH = (sys.executable, "-m", "hetu_fx.cli", "launch", "--nproc", "2", "--")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Give the parameters after a run of one process that never ended before its time."""
    folder = tmp_path_factory.mktemp("straight")
    assert run(sys.executable, SCRIPT, str(folder), "6", "nobody", seconds=SECONDS)[0] == 0
    return json.loads((folder / "rank_0.json").read_text())


@pytest.mark.distributed
@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("launcher", ["torchrun", "launch"])
def test_a_signal_to_one_rank_saves_on_all_and_the_job_goes_on_as_if_never_ended(
    tmp_path: Path, launcher: str, straight: dict[str, Any]
) -> None:
    command = (*TORCHRUN, free_port()) if launcher == "torchrun" else LAUNCH
    status, said = run(*command, SCRIPT, str(tmp_path), "6", "rank", seconds=SECONDS)
    assert status == 0, said[-4000:]
    assert "ranks (1,) got the signal to end" in said
    assert not list(tmp_path.glob("rank_*.json"))
    status, said = run(*command, SCRIPT, str(tmp_path), "6", "nobody", seconds=SECONDS)
    assert status == 0, said[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        for name, values in straight.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), rtol=1e-10, atol=1e-12)


@pytest.mark.distributed
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("launcher", ["torchrun", "launch"])
def test_a_signal_to_the_launcher_reaches_the_processes_which_save(tmp_path: Path, launcher: str) -> None:
    command = (*TORCHRUN, free_port()) if launcher == "torchrun" else LAUNCH
    status, said = run(*command, SCRIPT, str(tmp_path), str(LONG), "launcher", seconds=SECONDS)
    assert status != 0  # the launcher's own: it was told to end
    assert "got the signal to end" in said, said[-4000:]
    assert (tmp_path / "stopped" / "model.safetensors").is_file()
    assert not list(tmp_path.glob("rank_*.json"))
