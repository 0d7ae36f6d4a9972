"""Launchers of several machines: how they meet, whom they refuse, and how the job ends on all of them.

The machines are processes with a name each that meet at the loopback; workers only say what they are told to.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters, RendezvousStateError

from hetu_fx.base.machine import NODE_VARIABLE
from hetu_fx.cli.main import main
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.launch import rendezvous_store
from hetu_fx.launch.job import LaunchSpec, MessageChannel, NodesSpec
from hetu_fx.launch.launcher import ENDED_ELSEWHERE_STATUS, JobLauncher
from hetu_fx.launch.rendezvous_handler import BACKEND, HetuRendezvous
from hetu_fx.launch.times import Times
from hetu_fx.plans.plan import Plan

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

PLANNED_SCRIPT = Path(__file__).with_name("planned_script.py")
SECONDS = 120.0
REFUSED_STATUS = 2

Behaviour = Callable[[dict[str, str], MessageChannel], bool]


def worker(behaviour: Behaviour) -> Callable[[LaunchSpec, MessageChannel], int]:
    """Make a worker that does something at each start; it is done, or (False) waits until it is told of a loss."""

    def work(spec: LaunchSpec, channel: MessageChannel) -> int:
        channel.send("ready")
        for message in channel.messages():
            match message["kind"]:
                case "start" if behaviour(message["environment"], channel):
                    channel.send("done", reason="")
                case "lost":
                    channel.send("stopped", reason="a peer is lost")
                case "join":
                    channel.send("left", reason="processes join")
                case "end":
                    return 0
        return 1

    return work


class Machine:
    """A launcher in a process of its own, with the name of a machine."""

    def __init__(self, folder: Path, name: str, where: str, behaviour: Behaviour, **how: Any) -> None:
        self.where = where
        self.output, self.events = folder / f"{name}_output", folder / f"{name}_events"
        nodes = NodesSpec(how.pop("least", 2), 3, where, times=Times(reach=how.pop("reach", 30.0)))
        options = {"nproc": 1, "min_nproc": 1, "stopped_seconds": 120.0, "events": self.events, **how}
        act = options.pop("first", lambda: None)
        self.process = os.fork()
        if self.process:
            return
        status = 1
        try:
            os.environ["HETU_FX_NODE"] = name.partition("_")[0]
            written = os.open(self.output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(written, 2)
            sys.stderr = open(written, "w", buffering=1, closefd=False)
            logging.basicConfig(force=True, stream=sys.stderr)
            act()
            status = JobLauncher(LaunchSpec(("script.py",), nodes=nodes, **options), worker(behaviour)).run()
        except EnvironmentProblem as error:
            os.write(2, str(error).encode())
            status = REFUSED_STATUS
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)

    def end(self) -> int:
        """Wait for its end; return its status."""
        deadline = time.monotonic() + SECONDS
        while not (ended := os.waitpid(self.process, os.WNOHANG))[0]:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)
        self.process = 0
        return os.waitstatus_to_exitcode(ended[1])

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def until(self, ready: Callable[[], Any]) -> None:
        """Wait for something to become so."""
        deadline = time.monotonic() + SECONDS
        while not ready():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def starts(self) -> list[list[int]]:
        """Return the processes of each start."""
        lines = self.events.read_text().splitlines() if self.events.exists() else []
        return [event["workers"] for event in map(json.loads, lines) if event["event"] == "start"]


@contextmanager
def started(folder: Path) -> Iterator[Callable[..., Machine]]:
    """Give what starts machines of one job; whatever is left at the end is killed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    found: list[Machine] = []

    def start(name: str, behaviour: Behaviour, **how: Any) -> Machine:
        found.append(Machine(folder, name, where, behaviour, **how))
        return found[-1]

    try:
        yield start
    finally:
        for machine in found:
            if machine.process:
                os.kill(machine.process, signal.SIGKILL)
                os.waitpid(machine.process, 0)


def is_done(environment: dict[str, str], channel: MessageChannel) -> bool:
    return True


def waits(environment: dict[str, str], channel: MessageChannel) -> bool:
    return False


def test_processes_of_unequal_machines_are_numbered_through_and_meet_at_one_store(tmp_path: Path) -> None:
    def tells(environment: dict[str, str], channel: MessageChannel) -> bool:
        (tmp_path / f"rank_{environment['RANK']}").write_text(json.dumps(environment))
        return True

    with started(tmp_path) as start:
        machines = [start("one", tells, nproc=2), start("two", tells)]
        assert [machine.end() for machine in machines] == [0, 0]
    told = [json.loads((tmp_path / f"rank_{rank}").read_text()) for rank in range(3)]
    assert len({(of["MASTER_ADDR"], of["MASTER_PORT"]) for of in told}) == 1
    assert {of["WORLD_SIZE"] for of in told} == {"3"}
    places = sorted((of["GROUP_RANK"], of["LOCAL_RANK"]) for of in told if of["LOCAL_WORLD_SIZE"] == "2")
    assert places in ([("0", "0"), ("0", "1")], [("1", "0"), ("1", "1")])


def test_a_lost_process_has_the_script_run_again_on_all_machines_in_the_same_processes(tmp_path: Path) -> None:
    def dies(environment: dict[str, str], channel: MessageChannel) -> bool:
        if (environment["HETU_FX_START"], environment["LOCAL_RANK"]) == ("0", "1"):
            os.kill(os.getpid(), signal.SIGKILL)
        return environment["HETU_FX_START"] != "0"

    with started(tmp_path) as start:
        one, two = start("one", dies, nproc=2), start("two", dies)
        assert [machine.end() for machine in (one, two)] == [0, 0]
    assert [len(workers) for workers in one.starts()] == [2, 1]
    assert one.starts()[1] == one.starts()[0][:1]
    assert two.starts()[1] == two.starts()[0]
    assert "one: rank" in two.said()  # which process was lost, and where
    assert "was ended by SIGKILL" in two.said() or "is gone" in two.said()


def test_an_error_of_a_script_ends_the_job_on_all_machines(tmp_path: Path) -> None:
    def fails(environment: dict[str, str], channel: MessageChannel) -> bool:
        os._exit(3)

    with started(tmp_path) as start:
        one, two = start("one", waits), start("two", fails)
        assert [machine.end() for machine in (one, two)] == [ENDED_ELSEWHERE_STATUS, 3]
    assert "the job has ended: two: rank" in one.said()
    assert "ended with status 3" in one.said()


def test_a_machine_that_is_lost_is_missed_by_the_others_which_stay_in_their_processes(tmp_path: Path) -> None:
    killed = tmp_path / "killed"

    def notes(environment: dict[str, str], channel: MessageChannel) -> bool:
        (tmp_path / f"world_{os.environ['HETU_FX_NODE']}").write_text(environment["WORLD_SIZE"])
        return killed.exists() and environment["WORLD_SIZE"] == "2"

    def worlds() -> set[str]:
        return {path.read_text() for path in tmp_path.glob("world_*")}

    with started(tmp_path) as start:
        three = [start(name, notes) for name in "abc"]
        three[0].until(lambda: worlds() == {"3"} and len(list(tmp_path.glob("world_*"))) == 3)
        killed.touch()
        os.kill(three[2].process, signal.SIGKILL)
        assert [machine.end() for machine in three[:2]] == [0, 0]
    assert all("machines ['c'] are gone" in machine.said() for machine in three[:2])
    assert all(len({*map(tuple, machine.starts())}) == 1 for machine in three[:2])


def _other_version() -> None:
    metadata.version = lambda distribution_name: "0.0.0"


def _other_secret() -> None:
    os.environ[rendezvous_store.SECRET] = "another"


@pytest.mark.parametrize(
    ("name", "unlike", "why"),
    [
        ("two", _other_secret, "is of another job"),
        ("two", _other_version, "is of another job"),
        ("one_again", lambda: None, "a machine of the job has the name 'one' already"),
    ],
    ids=["secret", "version", "name"],
)
def test_a_machine_that_cannot_be_of_the_job_is_refused_and_the_others_say_so(
    tmp_path: Path, name: str, unlike: Callable[[], None], why: str
) -> None:
    with started(tmp_path) as start:
        one = start("one", waits, least=1)
        one.until(one.starts)
        assert (other := start(name, waits, first=unlike)).end() == REFUSED_STATUS
        assert why in other.said()
        one.until(lambda: "was refused by the rendezvous" in one.said())


def test_torchrun_does_not_join_a_job_of_the_launcher(tmp_path: Path) -> None:
    with started(tmp_path) as start:
        one = start("one", waits, least=1)
        one.until(one.starts)
        with pytest.raises(RendezvousStateError, match=r"is for hetu_fx .*, id 'none \(hetu-fx launch\)'"):
            HetuRendezvous(RendezvousParameters(BACKEND, one.where, "none", 1, 2))


def test_an_endpoint_that_nobody_serves_is_an_error_that_names_it(tmp_path: Path) -> None:
    nowhere = Machine(tmp_path, "one", "192.0.2.1:29400", waits, reach=0.5)
    assert nowhere.end() == REFUSED_STATUS
    assert "no machine serves the rendezvous at 192.0.2.1:29400" in nowhere.said()


def test_more_machines_than_the_plan_file_has_devices_is_an_error_on_all_of_them(tmp_path: Path) -> None:
    Plan.data_parallel(range(2)).write(tmp_path / "plan.json")
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    launch = [sys.executable, "-m", "hetu_fx.cli", "launch", "--nproc", "1", "--nnodes", "3", "--rdzv-endpoint", where]
    command = [*launch, "--rdzv-conf", "reach=60", "--", str(PLANNED_SCRIPT), str(tmp_path / "plan.json")]
    machines = [
        subprocess.Popen(command, env={**os.environ, NODE_VARIABLE: name}, stderr=subprocess.PIPE, text=True)
        for name in "abc"
    ]
    try:
        said = [machine.communicate(timeout=SECONDS)[1] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    assert [machine.returncode for machine in machines] == [1, 1, 1]
    for text in said:
        assert "plan file 'plan.json' is for 2 devices, and there are 3: it neither uses nor leaves out [2]" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "3:1", "--rdzv-endpoint", "one"], "--nnodes is 3:1\nhint: give the least and the most"),
        (["--nnodes", "few", "--rdzv-endpoint", "one"], "--nnodes is 'few'\nhint: give a number of machines"),
        (["--nnodes", "1:3"], "--nnodes needs --rdzv-endpoint\nhint: "),
        (["--nnodes", "1:3", "--rdzv-endpoint", "one", "--rdzv-conf", "beet=1"], "it takes alone_after, beat"),
    ],
)
def test_what_the_words_cannot_be_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--nproc", "1", *words, "--", "script.py"]) == REFUSED_STATUS
    assert message in capsys.readouterr().err
