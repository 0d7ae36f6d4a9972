"""What can go wrong in a run, and what must come of it: a table by the kind of fault."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.chaos_job import ChaosError, Job

LATER = ("forward", "backward", "sync", "step", "snapshot", "switch", "save")
PHASES = (*LATER, "plan", "load")
SLOW_PART = 0.3  # of the time after which a process is taken for stopped
CALM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to which processes, when (time.monotonic), and what the first of them was at."""

    kind: str
    phase: str
    victims: tuple[int, ...]
    done: float


def _lose(job: Job, fault: Fault, *signals: signal.Signals) -> None:
    """Processes are gone, or stopped for good: the run begins anew without them."""
    for victim, number in zip(fault.victims, signals, strict=True):
        os.kill(victim, number)
    job.wait_for(f"that {fault} is noticed", lambda: len(job.lost(fault.victims)) == len(fault.victims))
    noticed = job.lost(fault.victims)[-1]["seconds"]
    job.wait_for(f"another start after {fault}", lambda: job.starts()[-1]["seconds"] > noticed)


def _slow(job: Job, fault: Fault) -> None:
    """All that a process sends is late: that is no fault."""
    os.kill(fault.victims[0], signal.SIGSTOP)
    time.sleep(SLOW_PART * job.bounds.stopped)
    os.kill(fault.victims[0], signal.SIGCONT)
    goes_on = time.monotonic()
    job.wait_for(f"steps after {fault}", lambda: len(job.steps(goes_on)) >= CALM_STEPS)
    if any(event["seconds"] > fault.done for event in job.lost()):
        raise ChaosError(f"{fault} was only slow, and is taken for lost")


def _nan(job: Job, fault: Fault) -> None:
    """One process computes what is no number: all see it alike, and go back together."""
    (job.folder / f"poison_{fault.victims[0]}").touch()
    job.wait_for(f"the way back after {fault}", lambda: job.told("rolled_back", fault.done))


def _full(job: Job, fault: Fault) -> None:
    """Nothing can be saved for a while: the training goes on."""
    job.disk.fill()
    try:
        job.wait_for(f"a failed save after {fault}", lambda: job.told("save_failed", fault.done))
    finally:
        job.disk.free()


Inflict = Callable[[Job, Fault], None]
LOSSES: dict[str, tuple[signal.Signals, ...]] = {
    "kill": (signal.SIGKILL,),
    "stop": (signal.SIGSTOP,),
    "kill both": (signal.SIGKILL, signal.SIGKILL),
    "kill and stop": (signal.SIGKILL, signal.SIGSTOP),
}
OTHERS: dict[str, Inflict] = {"slow": _slow, "nan": _nan, "full": _full}
KINDS = (*LOSSES, *OTHERS)


def inflict(job: Job, kind: str, phase: str, chance: random.Random) -> Fault:
    """Do one fault, and wait until what must come of it has come."""
    signals = LOSSES.get(kind, (None,))
    workers = job.wait_for("processes", job.starts)[-1]["workers"]
    victims = tuple(chance.sample(workers, min(len(signals), len(workers))))
    job.wait_for(f"process {victims[0]} at {phase}", lambda: job.phase(victims[0]) == phase)
    fault = Fault(kind, job.phase(victims[0]), victims, time.monotonic())
    if kind in LOSSES:
        _lose(job, fault, *LOSSES[kind][: len(victims)])
    else:
        OTHERS[kind](job, fault)
    return fault


def _has_done(job: Job, steps: int, after: float) -> bool:
    return len(job.steps(after)) >= steps


def inflict_all(job: Job, faults: int, kinds: tuple[str, ...], interval: float, chance: random.Random) -> list[Fault]:
    """Do faults, and wait after each until `interval` seconds have passed since it.

    Those that cost no process, and those in the middle of a step, come some steps after a start; those at the
    beginning of a run follow another one at once: there are none with an interval.
    """
    done: list[Fault] = []
    for _ in range(faults):
        kind = chance.choice(kinds)
        follows_at_once = not interval and bool(done) and done[-1].kind in LOSSES
        phase = chance.choice(PHASES if follows_at_once and kind in LOSSES else LATER)
        if phase in LATER:
            after, pause = job.wait_for("a start", job.starts)[-1]["seconds"], chance.randrange(1, 4)
            job.wait_for(f"{pause} steps", partial(_has_done, job, pause, after))
        done.append(inflict(job, kind, phase, chance))
        time.sleep(max(0.0, done[-1].done + interval - time.monotonic()))
    return done
