"""Kills and stops processes of a training run at random moments, and checks what comes out of it.

`python -m tests.chaos --faults 200 --seed 1` runs `chaos_script.py` under `hetu-fx launch`;
it passes if the run never hangs, its parameters equal those of one process without faults, and no batch is lost or
repeated. Prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import hetu_fx.api  # noqa: F401  (once, for all forks)
from hetu_fx.launch_spec import LaunchSpec
from hetu_fx.launch_worker import run as launch

SCRIPT = Path(__file__).with_name("chaos_script.py")
LATER = ("forward", "backward", "step", "snapshot", "save")
PHASES = (*LATER, "plan", "load")
STEPS_PER_FAULT = 25
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PAUSE_SECONDS = 0.002
TOLERANCE = 1e-10


class ChaosError(Exception):
    """The run did what it must not."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to which process, when (time.monotonic), and what it was at."""

    kind: str
    phase: str
    victim: int
    done: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came of a fault, in seconds after it.

    Attributes:
        detect: until the launcher knew.
        regroup: until the others, and those that took the lost one's place, began anew.
        resume: until they had finished a step; None if the next fault came before.
        steps_lost: finished steps that had to be done again.
        world: processes after it.
    """

    kind: str
    phase: str
    detect: float
    regroup: float
    resume: float | None
    steps_lost: int
    world: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds: after which a stopped process must be noticed, and in which a run must be going again."""

    stopped: float
    hang: float


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


class Job:
    """A launched run, seen from outside: by its files, and the processes that it names there."""

    def __init__(self, folder: Path, steps: int, bounds: Bounds, processes: int) -> None:
        folder.mkdir()
        self.folder, self.bounds = folder, bounds
        self.events, self.progress = Lines(folder / "events.jsonl"), Lines(folder / "progress.jsonl")
        self.process = os.fork()
        if not self.process:
            os._exit(_launch(self.spec(steps, processes), folder))
        self.status: int | None = None

    def spec(self, steps: int, processes: int) -> LaunchSpec:
        return LaunchSpec(
            command=(str(SCRIPT), str(self.folder), str(steps)),
            nproc=processes,
            min_nproc=2,
            max_losses=100_000,
            stopped_seconds=self.bounds.stopped,
            grace_seconds=self.bounds.hang / 4,
            events=self.events.path,
        )

    def has_ended(self) -> bool:
        if self.status is None and (ended := os.waitpid(self.process, os.WNOHANG))[0]:
            self.status = os.waitstatus_to_exitcode(ended[1])
        return self.status is not None

    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == "start"]

    def steps(self, after: float) -> list[dict[str, Any]]:
        return [line for line in self.progress() if line["seconds"] > after and "step" in line]

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
        """Wait for the run's end; returns its result."""
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
        """Leave no process behind: the launcher ends its own."""
        if not self.has_ended():
            os.kill(self.process, signal.SIGTERM)
            os.waitpid(self.process, 0)


def _launch(spec: LaunchSpec, folder: Path) -> int:
    """Run a job in this process, a fork, with its output in a file."""
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    try:
        return launch(spec)
    except SystemExit as end:  # by a signal
        return int(end.code or 0)


def inflict(job: Job, kind: str, phase: str, chance: random.Random) -> Fault:
    """Do one fault, and wait until the run has begun anew."""
    start = job.wait_for("processes", job.starts)[-1]
    victim = chance.choice(start["workers"])
    job.wait_for(f"process {victim} at {phase}", lambda: job.phase(victim) == phase)
    fault = Fault(kind, job.phase(victim), victim, time.monotonic())
    os.kill(victim, SIGNALS[kind])
    job.wait_for(f"another start after a {kind} at {phase}", lambda: job.starts()[-1]["number"] > start["number"])
    return fault


def inflict_all(job: Job, faults: int, chance: random.Random) -> list[Fault]:
    """Do all faults, one after the other; those at the beginning of a run follow another at once."""
    done = []
    for number in range(faults):
        phase = chance.choice(PHASES if number else LATER)
        if phase in LATER:
            after = job.wait_for("a start", job.starts)[-1]["seconds"]
            pause = chance.randrange(1, 4)
            job.wait_for(f"{pause} steps", lambda after=after, pause=pause: len(job.steps(after)) >= pause)
        done.append(inflict(job, chance.choice(list(SIGNALS)), phase, chance))
    return done


def recovery_of(fault: Fault, job: Job, until: float) -> Recovery:
    """Read what came of a fault from what launcher and script have written; the next fault came at `until`."""
    lost = next(e["seconds"] for e in job.events() if e["event"] == "lost" and e["worker"] == fault.victim)
    start = next(e for e in job.starts() if e["seconds"] > lost)
    first = next((line["seconds"] for line in job.steps(start["seconds"]) if line["seconds"] < until), None)
    finished = max((line["step"] for line in job.steps(0) if line["seconds"] < start["seconds"]), default=0)
    begun = next((line["resumed"] for line in job.progress() if _tells_of(line, start, until)), finished)
    return Recovery(
        kind=fault.kind,
        phase=fault.phase,
        detect=lost - fault.done,
        regroup=start["seconds"] - fault.done,
        resume=None if first is None else first - fault.done,
        steps_lost=max(0, finished - begun),
        world=len(start["workers"]),
    )


def _tells_of(line: dict[str, Any], start: dict[str, Any], until: float) -> bool:
    return "resumed" in line and start["seconds"] < line["seconds"] < until


def check(result: dict[str, Any], right: dict[str, Any], steps: int) -> float:
    """Return the largest difference of any parameter. Raises ChaosError for it, and for batches lost or repeated."""
    if result["seen"] != list(range(steps)):
        raise ChaosError(f"batches were lost or repeated: {result['seen']}")
    worst = max(
        float((torch.tensor(result["parameters"][name]) - torch.tensor(whole)).abs().max())
        for name, whole in right["parameters"].items()
    )
    if not worst <= TOLERANCE:
        raise ChaosError(f"parameters differ by {worst:.3g} from those of a run without faults")
    return worst


def run(faults: int, seed: int, bounds: Bounds, processes: int = 3) -> dict[str, Any]:
    """Run the script without and with faults; returns what is to be reported. Raises ChaosError."""
    steps = STEPS_PER_FAULT * (faults + 1)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder) / "chaos", steps, bounds, processes)
        try:
            done = inflict_all(job, faults, chance)
            result = job.finish()
        except ChaosError as error:
            raise ChaosError(f"seed {seed}: {error}\n{(job.folder / 'output').read_text()[-3000:]}") from error
        finally:
            job.end()
        worst = check(result, without_faults(Path(folder) / "right", steps), steps)
        ends = [*(fault.done for fault in done[1:]), float("inf")]
        recoveries = [recovery_of(fault, job, until) for fault, until in zip(done, ends, strict=True)]
    return {"seed": seed, "faults": len(done), "steps": steps, "worst_difference": worst, **summary(recoveries)}


def without_faults(folder: Path, steps: int) -> dict[str, Any]:
    """Run the script in this process alone; returns its result."""
    folder.mkdir()
    os.environ.update(RANK="0", WORLD_SIZE="1")
    sys.argv[1:] = [str(folder), str(steps)]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def summary(recoveries: Sequence[Recovery]) -> dict[str, Any]:
    """Sum up by kind of fault: p50 and p95 in seconds, and steps lost."""
    made: dict[str, Any] = {"rows": [asdict(recovery) for recovery in recoveries]}
    for kind in SIGNALS:
        chosen = [recovery for recovery in recoveries if recovery.kind == kind]
        for name in ("detect", "regroup", "resume"):
            values = sorted(v for r in chosen if (v := getattr(r, name)) is not None)
            made[f"{kind}_{name}_seconds"] = {p: _quantile(values, p) for p in (50, 95)} if values else None
        made[f"{kind}_steps_lost"] = sum(recovery.steps_lost for recovery in chosen)
    return made


def _quantile(values: Sequence[float], percent: int) -> float:
    return values[min(len(values) - 1, len(values) * percent // 100)]


def main(words: Sequence[str] | None = None) -> int:
    """Run it, and print what came out."""
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--stopped-after", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--hang-after", type=float, default=180.0, metavar="SECONDS")
    options = parser.parse_args(words)
    try:
        made = run(options.faults, options.seed, Bounds(options.stopped_after, options.hang_after), options.processes)
    except ChaosError as error:
        print(f"failed: {error}")
        return 1
    print_table(made)
    print(json.dumps(made))
    return 0


def print_table(made: dict[str, Any]) -> None:
    """Print p50 and p95 in milliseconds, and steps lost."""
    print(f"{made['faults']} faults in {made['steps']} steps, parameters within {made['worst_difference']:.2g}")
    print(f"{'':10}{'detect':>16}{'regroup':>16}{'resume':>16}{'steps lost':>12}   (ms, p50 / p95)")
    for kind in SIGNALS:
        cells = [made[f"{kind}_{name}_seconds"] for name in ("detect", "regroup", "resume")]
        texts = ["-" if cell is None else f"{1e3 * cell[50]:.0f} / {1e3 * cell[95]:.0f}" for cell in cells]
        print(f"{kind:10}{texts[0]:>16}{texts[1]:>16}{texts[2]:>16}{made[f'{kind}_steps_lost']:>12}")


if __name__ == "__main__":
    sys.exit(main())
