"""What can go wrong in a run, and what must come of it: tables by the kind of fault."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from tests.chaos_job import Job
from tests.chaos_machine import SLOW_BITS_PER_SECOND, Space

LATER = ("forward", "backward", "sync", "step", "snapshot", "switch", "save")
EARLY = ("plan", "load")
SLOW_PART = 0.3  # of the time after which a process is taken for stopped
CALM_STEPS = 3
PENDING_STEPS = 2  # a snapshot is known to be whole after the next one's step at the latest
SLOW_NETWORK_SECONDS = 2.0  # at least
NO_NETWORK_SECONDS = 1.0  # less than any bound


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to which processes, when (time.monotonic), and what the first of them was at.

    `over` is when what must come of it had come; 0 before.
    """

    kind: str
    phase: str
    victims: tuple[int, ...]
    done: float
    over: float = 0.0


# How processes are lost.

Strike = Callable[[Job, tuple[int, ...]], None]


def _signals(*signals: signal.Signals) -> Strike:
    def strike(job: Job, victims: tuple[int, ...]) -> None:
        for victim, number in zip(victims, signals, strict=False):
            os.kill(victim, number)

    return strike


def _take_memory_too(job: Job, victims: tuple[int, ...]) -> None:
    """As where a machine is lost: what processes have kept of snapshots goes with them."""
    for victim in victims:
        os.kill(victim, signal.SIGSTOP)  # it writes nothing after that
    job.forget(victims)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)


def _starve(job: Job, victims: tuple[int, ...]) -> None:
    """Give no more memory to processes: the kernel kills them."""
    for victim in victims:
        job.limits.starve(victim)


# What else may go wrong at the same time. The victim is the process whose phase is waited for after that.

Trouble = Callable[[Job, int, random.Random], AbstractContextManager[None]]


def _no_trouble(job: Job, victim: int, chance: random.Random) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def _slow_network(job: Job, victim: int, chance: random.Random) -> Iterator[None]:
    job.network.slow(chance.choice(SLOW_BITS_PER_SECOND))
    try:
        yield
    finally:
        job.network.mend()


@contextmanager
def _full_disk(job: Job, victim: int, chance: random.Random) -> Iterator[None]:
    job.disk.fill()
    try:
        yield
    finally:
        job.disk.free()


@contextmanager
def _full_memory(job: Job, victim: int, chance: random.Random) -> Iterator[None]:
    """Have no room for snapshots; begins once one has been given up."""
    began = time.monotonic()
    try:
        job.wait_for("a snapshot that is given up", _while_full(job.memory, lambda: _gives_up(job, began)))
        yield
    finally:
        job.memory.free()


def _while_full(space: Space, find: Callable[[], object]) -> Callable[[], object]:
    """Return what finds something, and takes before what room a run has made by removing files of its own."""

    def look() -> object:
        space.fill()
        return find()

    return look


def _gives_up(job: Job, after: float) -> bool:
    return any(line["step"] - line["kept"] > PENDING_STEPS for line in job.steps(after))


def _keeps(job: Job, after: float) -> bool:
    return any(line["step"] - line["kept"] <= PENDING_STEPS for line in job.steps(after))


@contextmanager
def _no_number(job: Job, victim: int, chance: random.Random) -> Iterator[None]:
    job.poison(victim)
    yield


@dataclass(frozen=True, slots=True)
class Loss:
    """So many processes are gone, or stopped for good: the run begins anew without them.

    They may be lost in any of `phases`, and in those of `early` at the beginning of a run that follows another loss.
    """

    processes: int
    strike: Strike
    trouble: Trouble = _no_trouble
    phases: tuple[str, ...] = LATER
    early: tuple[str, ...] = EARLY

    @property
    def is_long(self) -> bool:
        """Tell whether there are steps again before it is over."""
        return self.trouble is not _no_trouble

    def __call__(self, job: Job, fault: Fault) -> None:
        self.strike(job, fault.victims)
        job.wait_for(f"that {fault} is noticed", lambda: len(job.lost(fault.victims)) == len(fault.victims))
        noticed = job.lost(fault.victims)[-1]["seconds"]
        job.wait_for(f"another start after {fault}", lambda: job.starts()[-1]["seconds"] > noticed)
        if self.is_long:  # the others get over it while that lasts
            _wait_for_steps(job, fault, job.starts()[-1]["seconds"])


def _wait_for_steps(job: Job, fault: Fault, after: float) -> None:
    job.wait_for(f"steps after {fault}", lambda: len(job.steps(after)) >= CALM_STEPS)


# What costs no process: each does it, and waits until it has passed.

Passing = Callable[[Job, Fault, random.Random], None]


def _is_slow(job: Job, fault: Fault, chance: random.Random) -> None:
    """All that a process sends is late."""
    os.kill(fault.victims[0], signal.SIGSTOP)
    time.sleep(SLOW_PART * job.bounds.stopped)
    os.kill(fault.victims[0], signal.SIGCONT)
    _wait_for_steps(job, fault, time.monotonic())


def _has_nan(job: Job, fault: Fault, chance: random.Random) -> None:
    """One process computes what is no number: all see it alike, and go back together."""
    job.poison(fault.victims[0])
    job.wait_for(f"the way back after {fault}", lambda: job.told("rolled_back", fault.done))


def _has_full_disk(job: Job, fault: Fault, chance: random.Random) -> None:
    """Nothing can be saved for a while: the training goes on."""
    with _full_disk(job, fault.victims[0], chance):
        fails = _while_full(job.disk, lambda: job.told("save_failed", fault.done))
        job.wait_for(f"a failed save after {fault}", fails)


def _has_full_memory(job: Job, fault: Fault, chance: random.Random) -> None:
    """No snapshot can be kept for a while: the training goes on, and so do snapshots after that."""
    with _full_memory(job, fault.victims[0], chance):
        _wait_for_steps(job, fault, time.monotonic())
    freed = time.monotonic()
    job.wait_for(f"a snapshot after {fault}", lambda: _keeps(job, freed))


def _has_slow_network(job: Job, fault: Fault, chance: random.Random) -> None:
    """All that is sent is late, for some time."""
    with _slow_network(job, fault.victims[0], chance):
        time.sleep(SLOW_NETWORK_SECONDS)
        _wait_for_steps(job, fault, fault.done)
    _wait_for_steps(job, fault, time.monotonic())


def _has_no_network(job: Job, fault: Fault, chance: random.Random) -> None:
    """All that is sent is lost, for a moment."""
    job.network.cut()
    time.sleep(NO_NETWORK_SECONDS)
    job.network.mend()
    _wait_for_steps(job, fault, time.monotonic())


KILL = signal.SIGKILL
LOSSES = {
    "kill": Loss(1, _signals(KILL)),
    "stop": Loss(1, _signals(signal.SIGSTOP)),
    "kill both": Loss(2, _signals(KILL, KILL)),
    "kill and stop": Loss(2, _signals(KILL, signal.SIGSTOP)),
    "kill, its memory": Loss(1, _take_memory_too, early=()),
    "kill both, memory": Loss(2, _take_memory_too, early=()),
    "kill, nan": Loss(1, _signals(KILL), _no_number, ("load",), ()),
    "kill, full": Loss(1, _signals(KILL), _full_disk, ("save",), ()),
    "kill, full memory": Loss(1, _signals(KILL), _full_memory, ("snapshot",), ()),
    "out of memory": Loss(1, _starve),
    "kill, slow network": Loss(1, _signals(KILL), _slow_network),
}
PASSING: dict[str, Passing] = {
    "slow": _is_slow,
    "nan": _has_nan,
    "full": _has_full_disk,
    "full memory": _has_full_memory,
    "slow network": _has_slow_network,
    "no network": _has_no_network,
}
KINDS = (*LOSSES, *PASSING)
NEEDS_DISK = ("full", "kill, full")
NEEDS_MEMORY = ("full memory", "kill, full memory")
NEEDS_LIMITS = ("out of memory",)
NEEDS_NETWORK = ("slow network", "no network", "kill, slow network")


def left_out(job: Job) -> dict[str, str]:
    """Return the kinds of faults that cannot be done here, and why."""
    needs = (
        (NEEDS_DISK, job.disk),
        (NEEDS_MEMORY, job.memory),
        (NEEDS_LIMITS, job.limits),
        (NEEDS_NETWORK, job.network),
    )
    return {kind: place.refusal for kinds, place in needs if place.refusal for kind in kinds}
