"""A launched run as the chaos tests see it: from outside, by its files, and the processes that it names there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetu_fx.launch_spec import LaunchSpec
from hetu_fx.launch_worker import run as launch

SCRIPT = Path(__file__).with_name("chaos_script.py")
PAUSE_SECONDS = 0.002
DISK_MIB = 16
LAST_STEPS = 20  # that a run still does once it is told to end: more than any process may be ahead of what it has told


class ChaosError(Exception):
    """The run did what it must not."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds: after which a stopped process must be noticed, a run be going again, a lost process come back."""

    stopped: float
    hang: float
    rejoin: float


class Lines:
    """A file of JSON lines that grows."""

    def __init__(self, path: Path) -> None:
        self.path, self._rest, self._at, self._read = path, b"", 0, list[dict[str, Any]]()

    def __call__(self) -> list[dict[str, Any]]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
            self._at += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            self._read += map(json.loads, lines)
        return self._read


def set_steps(folder: Path, steps: int) -> None:
    """Tell the script how many steps it is to do."""
    (folder / "steps.new").write_text(str(steps))
    (folder / "steps.new").rename(folder / "steps")


class Disk:
    """The file system that a run saves to: a small one of its own, where this user may mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
        self.is_own = os.geteuid() == 0 and not subprocess.run(mount, capture_output=True, check=False).returncode

    def fill(self) -> None:
        """Leave no space on it."""
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    def free(self) -> None:
        """Give the space back."""
        (self.folder / "ballast").unlink()

    def close(self) -> None:
        """Unmount it."""
        if self.is_own:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class Job:
    """A run of the script under `hetu-fx launch`."""

    def __init__(self, folder: Path, bounds: Bounds, processes: int) -> None:
        folder.mkdir()
        self.folder, self.bounds = folder, bounds
        self.disk = Disk(folder / "saved")
        set_steps(folder, 10**9)
        self.events, self.progress = Lines(folder / "events.jsonl"), Lines(folder / "progress.jsonl")
        self.process = os.fork()
        if not self.process:
            os._exit(_launch(self.spec(processes), folder))
        self.status: int | None = None

    def spec(self, processes: int) -> LaunchSpec:
        return LaunchSpec(
            command=(str(SCRIPT), str(self.folder)),
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

    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == "start"]

    def lost(self, workers: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Return what is told of lost processes: of these, or of all."""
        lost = [event for event in self.events() if event["event"] == "lost"]
        return [event for event in lost if not workers or event["worker"] in workers]

    def steps(self, after: float = 0.0) -> list[dict[str, Any]]:
        return [line for line in self.progress() if line["seconds"] > after and "step" in line]

    def told(self, what: str, after: float) -> list[dict[str, Any]]:
        """Return the lines of the script that tell of something."""
        return [line for line in self.progress() if line["seconds"] > after and what in line]

    def phase(self, process: int) -> str:
        path = self.folder / f"phase_{process}"
        return path.read_text() if path.exists() else ""

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
            os.waitpid(self.process, 0)
        self.disk.close()


def _launch(spec: LaunchSpec, folder: Path) -> int:
    """Run a job in this process, a fork, with its output in a file."""
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    try:
        return launch(spec)
    except SystemExit as end:  # by a signal
        return int(end.code or 0)
