"""A launched run as the chaos tests see it: from outside, by its files, and the processes that it names there."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetu_fx.checkpoint.snapshot_files import read_name
from hetu_fx.launch.job import LaunchSpec
from hetu_fx.launch.worker import run as launch
from tests.chaos_machine import Disk, MemoryLimits, Network, SharedMemory
from tests.chaos_record import ChaosError, Record

SCRIPT = Path(__file__).with_name("chaos_script.py")
PAUSE_SECONDS = 0.002
END_SECONDS = 8.0  # more than the launcher gives its processes to end
LAST_STEPS = 20  # that a run still does once it is told to end: more than any process may be ahead of what it has told


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds: after which a stopped process must be noticed, a run be going again, a lost process come back."""

    stopped: float
    hang: float
    rejoin: float


def set_steps(folder: Path, steps: int) -> None:
    """Tell the script how many steps it is to do."""
    (folder / "steps.new").write_text(str(steps))
    (folder / "steps.new").rename(folder / "steps")


class Job(Record):
    """A run of the script under `hetu-fx launch`."""

    def __init__(self, folder: Path, bounds: Bounds, processes: int, zero: int = 1) -> None:
        folder.mkdir(parents=True)
        super().__init__(folder)
        self.bounds, self.zero = bounds, zero
        self.disk, self.memory, self.limits = Disk(folder / "saved"), SharedMemory(), MemoryLimits()
        set_steps(folder, 10**9)
        self.network = Network(self.bad_network)
        self.process = os.fork()
        if not self.process:
            os._exit(_launch(self.spec(processes), folder, self.network, self.memory))
        self.network.belongs_to(self.process)
        self.memory.belongs_to(self.process)
        self.status: int | None = None

    def spec(self, processes: int) -> LaunchSpec:
        return LaunchSpec(
            command=(str(SCRIPT), str(self.folder), str(self.zero)),
            nproc=processes,
            min_nproc=min(2, processes),
            max_losses=100_000,
            stopped_seconds=self.bounds.stopped,
            grace_seconds=self.bounds.hang / 4,
            rejoin_seconds=self.bounds.rejoin,
            events=self.events.path,
        )

    def has_ended(self) -> bool:
        if self.status is None and (ended := os.waitpid(self.process, os.WNOHANG))[0]:
            self.status = os.waitstatus_to_exitcode(ended[1])
        return self.status is not None

    def phase(self, process: int) -> str:
        path = self.folder / f"phase_{process}"
        return path.read_text() if path.exists() else ""

    def poison(self, process: int) -> None:
        """Make the next batch of a process one that is no numbers."""
        (self.folder / f"poison_{process}").touch()

    def forget(self, processes: tuple[int, ...]) -> None:
        """Remove what these have kept of snapshots."""
        ranks = [self.starts()[-1]["workers"].index(process) for process in processes]
        for path in self.memory.folder.glob(f"hetu_fx_snapshots-*/launcher-*-{self.process}-*/*/*"):
            part = read_name(path.name)
            if part is not None and part.holder in ranks:
                path.unlink(missing_ok=True)

    def wait_for(self, what: str, find: Callable[[], Any]) -> Any:
        """Return what `find` finds. Raises ChaosError where the run hangs, or ends."""
        deadline = time.monotonic() + self.bounds.hang
        while not (found := find()):
            if self.has_ended():
                raise ChaosError(f"the run ended with status {self.status}; awaited: {what}")
            if time.monotonic() > deadline:
                raise ChaosError(f"nothing for {self.bounds.hang:g} s; awaited: {what}")
            time.sleep(PAUSE_SECONDS)
        return found

    def finish(self) -> dict[str, Any]:
        """Let the run come to its end; returns its result."""
        set_steps(self.folder, self.steps()[-1]["step"] + LAST_STEPS)
        while not self.has_ended():
            self._wait_for_more(len(self.progress()))
        if self.status:
            raise ChaosError(f"the run ended with status {self.status}")
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result

    def _wait_for_more(self, number: int) -> None:
        deadline = time.monotonic() + self.bounds.hang
        while len(self.progress()) == number and not self.has_ended():
            if time.monotonic() > deadline:
                raise ChaosError(f"nothing for {self.bounds.hang:g} s; awaited: the end")
            time.sleep(PAUSE_SECONDS)

    def end(self) -> None:
        """Leave nothing behind: the launcher ends its processes."""
        if not self.has_ended():
            os.kill(self.process, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while not self.has_ended():
            if time.monotonic() > deadline:
                os.kill(self.process, signal.SIGKILL)  # its processes end with it
            time.sleep(PAUSE_SECONDS)
        self.disk.close()
        self.limits.close()


def _launch(spec: LaunchSpec, folder: Path, *places: Network | SharedMemory) -> int:
    """Run a job in this process, a fork, with its output in a file."""
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    try:
        for place in places:
            place.enter()
        return launch(spec)
    except SystemExit as end:  # by a signal
        return int(end.code or 0)
    except BaseException:  # nothing may leave this function: what called it is of another process
        traceback.print_exc()
        return 1
