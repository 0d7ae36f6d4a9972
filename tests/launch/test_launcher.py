"""The launcher's decisions, with workers that only say what they are told to."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetu_fx.cli.main import main
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.launch.job import LaunchSpec, MessageChannel
from hetu_fx.launch.launcher import GAVE_UP_STATUS, JobLauncher
from tests.chaos_machine import MemoryLimits

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

SYS_EXIT = {"x86_64": 60, "aarch64": 93}  # asm/unistd.h

Behaviour = Callable[[dict[str, str], MessageChannel], bool]


def spec(folder: Path, **options: Any) -> LaunchSpec:
    plain = {"nproc": 2, "min_nproc": 1, "stopped_seconds": 120.0}
    return LaunchSpec(command=("script.py",), events=folder / "events", **{**plain, **options})


def worker(behaviour: Behaviour) -> Callable[[LaunchSpec, MessageChannel], int]:
    """Make a worker that does something at each start; it is done, or (False) waits until it is told of a loss."""

    def work(spec: LaunchSpec, channel: MessageChannel) -> int:
        channel.send("ready")
        for message in channel.messages():
            if message["kind"] == "start" and behaviour(message["environment"], channel):
                channel.send("done", reason="")
            if message["kind"] == "lost":
                channel.send("stopped", reason="a peer is lost")
            if message["kind"] == "end":
                return 0
        return 1

    return work


def run(folder: Path, behaviour: Behaviour, **options: Any) -> tuple[int, list[dict[str, Any]]]:
    return launch(folder, worker(behaviour), **options)


def launch(
    folder: Path, work: Callable[[LaunchSpec, MessageChannel], int], **options: Any
) -> tuple[int, list[dict[str, Any]]]:
    status = JobLauncher(spec(folder, **options), work).run()
    return status, [json.loads(line) for line in (folder / "events").read_text().splitlines()]


def worlds(events: list[dict[str, Any]]) -> list[int]:
    return [len(event["workers"]) for event in events if event["event"] == "start"]


def is_first(environment: dict[str, str], rank: int) -> bool:
    return (environment["HETU_FX_START"], environment["RANK"]) == ("0", str(rank))


def test_workers_that_are_done_end_the_job(tmp_path: Path) -> None:
    status, events = run(tmp_path, lambda environment, channel: True)
    assert (status, worlds(events)) == (0, [2])


def killed(environment: dict[str, str], channel: MessageChannel) -> bool:
    if is_first(environment, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return environment["HETU_FX_START"] != "0"


def test_the_others_go_on_in_their_processes_when_one_is_killed(tmp_path: Path) -> None:
    status, events = run(tmp_path, killed)
    assert (status, worlds(events)) == (0, [2, 1])
    first, second = (event["workers"] for event in events if event["event"] == "start")
    assert second == first[:1]
    assert [event["reason"] for event in events if event["event"] == "lost"] == [
        f"rank 1 (process {first[1]}) was ended by SIGKILL"
    ]


def test_of_one_that_the_kernel_kills_as_memory_runs_out_that_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(spec: LaunchSpec, channel: MessageChannel) -> int:
        limits.starve(os.getpid(), 1 << 26)
        return worker(needs_more)(spec, channel)

    def needs_more(environment: dict[str, str], channel: MessageChannel) -> bool:
        if is_first(environment, 1):
            bytearray(1 << 28)
        return environment["HETU_FX_START"] != "0"

    limits = MemoryLimits()
    if limits.refusal:
        pytest.skip(limits.refusal)
    try:
        status, events = launch(tmp_path, work)
    finally:
        limits.close()
    assert (status, worlds(events)) == (0, [2, 1])
    (reason,) = [event["reason"] for event in events if event["event"] == "lost"]
    assert "was ended by SIGKILL, by the kernel: memory has run out in its cgroup /" in reason
    assert f"hetu-fx launch: {reason}" in capfd.readouterr().err


def test_a_lost_one_is_replaced_where_all_are_needed(tmp_path: Path) -> None:
    status, events = run(tmp_path, killed, min_nproc=2)
    assert (status, worlds(events)) == (0, [2, 2])


def test_a_lost_one_comes_back_at_a_steps_end_of_the_others(tmp_path: Path) -> None:
    def work(spec: LaunchSpec, channel: MessageChannel) -> int:
        channel.send("ready")
        for message in channel.messages():
            match message["kind"], message.get("environment", {}).get("HETU_FX_START"):
                case "start", "0" if killed(message["environment"], channel):
                    raise AssertionError("this start is the one with the fault")
                case "start", "2":
                    channel.send("done", reason="")
                case "lost", _:
                    channel.send("stopped", reason="a peer is lost")
                case "join", _:
                    channel.send("left", reason="a process joins")
                case "end", _:
                    return 0
        return 1

    status, events = launch(tmp_path, work, nproc=3, rejoin_seconds=0.5)
    starts = [event["workers"] for event in events if event["event"] == "start"]
    assert (status, [len(workers) for workers in starts]) == (0, [3, 2, 3])
    assert starts[1] == starts[2][:2] == [starts[0][0], starts[0][2]]
    assert [event["workers"] for event in events if event["event"] == "ready to join"] == [starts[2][2:]]


def test_one_that_is_stopped_is_noticed_and_ended(tmp_path: Path) -> None:
    def stops(environment: dict[str, str], channel: MessageChannel) -> bool:
        def beat() -> None:
            while channel.send("beat"):
                time.sleep(0.05)

        threading.Thread(target=beat, daemon=True).start()
        if is_first(environment, 0):
            os.kill(os.getpid(), signal.SIGSTOP)
        return environment["HETU_FX_START"] != "0"

    status, events = run(tmp_path, stops, stopped_seconds=5.0)
    assert (status, worlds(events)) == (0, [2, 1])
    assert "has given no sign of life for" in next(e["reason"] for e in events if e["event"] == "lost")


def test_who_does_not_come_is_ended_and_it_is_said_what_for(tmp_path: Path) -> None:
    def hangs(environment: dict[str, str], channel: MessageChannel) -> bool:
        if is_first(environment, 1):
            channel.send("beat", waits_for="all-reduce", seconds=700.0)
        return environment["HETU_FX_START"] != "0"

    status, events = run(tmp_path, hangs)
    assert (status, worlds(events)) == (0, [2, 1])
    (reason,) = [event["reason"] for event in events if event["event"] == "lost"]
    assert "waiting for all-reduce since 700.0 s, and rank 0" in reason


def test_who_does_not_leave_its_groups_is_ended(tmp_path: Path) -> None:
    def stays(environment: dict[str, str], channel: MessageChannel) -> bool:
        if is_first(environment, 0):
            time.sleep(600)
        return killed(environment, channel)

    status, events = run(tmp_path, stays, grace_seconds=0.5, min_nproc=2)
    assert (status, worlds(events)) == (0, [2, 2])
    assert "did not leave its groups" in [e["reason"] for e in events if e["event"] == "lost"][1]


def test_one_that_takes_longer_to_end_than_the_others_to_be_done_is_told_of_all_the_same(tmp_path: Path) -> None:
    def goes_slowly(environment: dict[str, str], channel: MessageChannel) -> bool:
        if is_first(environment, 1):
            threading.Thread(target=time.sleep, args=(600,)).start()
            ctypes.CDLL(None).syscall(SYS_EXIT[platform.machine()], 0)  # ends this thread alone, as a kill begins
        return environment["HETU_FX_START"] != "0"

    status, events = run(tmp_path, goes_slowly)
    assert (status, worlds(events)) == (0, [2, 1])
    (reason,) = [event["reason"] for event in events if event["event"] == "lost"]
    assert "rank 1" in reason
    assert "was ended by SIGTERM" in reason


def test_an_error_of_the_script_ends_the_job_with_its_status(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fails(environment: dict[str, str], channel: MessageChannel) -> bool:
        if is_first(environment, 1):
            os._exit(3)
        return False

    assert run(tmp_path, fails)[0] == 3
    assert "ended with status 3" in capfd.readouterr().err


def test_the_launcher_gives_up_after_so_many_losses(tmp_path: Path) -> None:
    def dies(environment: dict[str, str], channel: MessageChannel) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return False

    assert run(tmp_path, dies, nproc=1, max_losses=2)[0] == GAVE_UP_STATUS


def test_the_launcher_gives_up_after_so_many_runs_that_end_without_a_loss(tmp_path: Path) -> None:
    def stops(environment: dict[str, str], channel: MessageChannel) -> bool:
        channel.send("stopped", reason="CommError: all-reduce failed")
        return False

    status, events = run(tmp_path, stops, nproc=1, max_losses=2)
    assert (status, worlds(events)) == (GAVE_UP_STATUS, [1, 1, 1])


def test_a_job_is_not_done_where_one_has_stopped_before_the_others_are_done(tmp_path: Path) -> None:
    def work(spec: LaunchSpec, channel: MessageChannel) -> int:
        channel.send("ready")
        for message in channel.messages():
            match message["kind"], message.get("environment"):
                case "start", {"HETU_FX_START": "0", "RANK": "0"}:
                    channel.send("stopped", reason="CommError: rank 1 has gone")
                case "start", {"HETU_FX_START": "1"}:
                    channel.send("done", reason="")
                case "lost", _:  # its end and this have crossed
                    channel.send("done", reason="")
                case "end", _:
                    return 0
        return 1

    status, events = launch(tmp_path, work)
    assert (status, worlds(events)) == (0, [2, 2])


def _stops_itself(environment: dict[str, str], channel: MessageChannel) -> bool:
    if environment["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return False


def _launched_in_a_process(folder: Path, behaviour: Behaviour) -> tuple[int, list[int]]:
    """Run a job of two workers in a process; return it, and descriptors of its workers once they have started."""
    process = os.fork()
    if not process:
        try:
            os._exit(JobLauncher(spec(folder, grace_seconds=2.0), worker(behaviour)).run())
        except SystemExit as end:
            os._exit(int(end.code or 0))
        finally:
            os._exit(1)
    deadline = time.monotonic() + 120
    while not (folder / "events").exists() or "start" not in (folder / "events").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (start,) = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    return process, [os.pidfd_open(one) for one in start["workers"]]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=lambda of: str(of)
)
def test_no_worker_stays_behind_its_launcher_not_even_a_stopped_one(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    launcher, workers = _launched_in_a_process(tmp_path, _stops_itself)
    os.kill(launcher, number)
    assert os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) == status
    for ended in workers:
        assert select.select([ended], [], [], 120)[0]  # readable once the process has ended
        os.close(ended)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_nproc": 3}, "--min-nproc is 3\nhint: give 1 to --nproc 2"),
        ({"grace_seconds": 0.0}, r"--grace are \(.*, 0\.0\)\nhint: give more than 0 seconds"),
        ({"rejoin_seconds": -1.0}, "--rejoin-after is -1\nhint: give 0 seconds or more"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentProblem, match=message):
        spec(tmp_path, **options)


def test_a_launch_without_a_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--nproc", "2"]) == 2
    assert "no script given\nhint: write hetu-fx launch" in capsys.readouterr().err


def test_messages_that_come_in_pieces_are_put_together() -> None:
    here, there = socket.socketpair()
    with here, there:
        channel = MessageChannel(here)
        there.sendall(b'{"kind": "re')
        assert channel.receive() == ()
        there.sendall(b'ady"}\n{"kind": "done"}\n')
        assert channel.receive() == ({"kind": "ready"}, {"kind": "done"})
        there.close()
        assert channel.receive() is None
        assert not channel.send("end")
