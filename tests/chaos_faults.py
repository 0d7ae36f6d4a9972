"""Deals faults at random moments, and waits for what must come of each."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from tests.chaos_job import Job
from tests.chaos_kinds import LATER, LOSSES, PASSING, Fault
from tests.chaos_record import ChaosError

MISSED_STEPS = 50  # more than lie between any two saves or switches


class Decks:
    """Deals kinds of faults and their phases in a random order, and each of them once before any comes again."""

    def __init__(self, kinds: tuple[str, ...], chance: random.Random) -> None:
        self._kinds, self._chance, self._decks = kinds, chance, dict[str, list[str]]()

    def kind(self) -> str:
        """Deal a kind."""
        return self._deal("", self._kinds, self._kinds)

    def phase(self, kind: str, may_be_early: bool) -> str:
        """Deal a phase for a kind; an early one only where it may be."""
        phases, early = (LOSSES[kind].phases, LOSSES[kind].early) if kind in LOSSES else (LATER, ())
        return self._deal(kind, (*phases, *early), (*phases, *early) if may_be_early else phases)

    def _deal(self, name: str, cards: tuple[str, ...], allowed: tuple[str, ...]) -> str:
        deck = self._decks.setdefault(name, [])
        if not set(deck) & set(allowed):
            deck += self._chance.sample(cards, len(cards))
        return deck.pop(next(place for place, card in enumerate(deck) if card in allowed))


def inflict(job: Job, kind: str, phase: str, chance: random.Random) -> Fault:
    """Do one fault, and wait until what must come of it has come."""
    workers = job.wait_for("processes", job.starts)[-1]["workers"]
    loss = LOSSES.get(kind)
    victims = tuple(chance.sample(workers, min(loss.processes if loss else 1, len(workers))))
    with loss.trouble(job, victims[0], chance) if loss else nullcontext():
        fault = Fault(kind, _wait_for_phase(job, victims[0], phase), victims, time.monotonic())
        loss(job, fault) if loss else PASSING[kind](job, fault, chance)
    lost = [event for event in job.lost() if event["seconds"] > fault.done]
    if lost and not loss:
        raise ChaosError(f"{fault} costs no process, but {lost[0]['reason']}")
    return replace(fault, over=time.monotonic())


def _wait_for_phase(job: Job, process: int, phase: str) -> str:
    """Wait until a process is at a phase; returns what it is at, another one if it has come and gone unseen."""
    began = time.monotonic()

    def is_time() -> bool:
        return job.phase(process) == phase or _has_done(job, MISSED_STEPS, began)

    job.wait_for(f"process {process} at {phase}", is_time)
    return job.phase(process) or phase


def _has_done(job: Job, steps: int, after: float) -> bool:
    return len(job.steps(after)) >= steps


def inflict_all(
    job: Job, faults: int, kinds: tuple[str, ...], interval: float, deadline: float, chance: random.Random
) -> Iterator[Fault]:
    """Do faults, and wait after each until `interval` seconds have passed since it; none begins after the deadline.

    Those that cost no process, and those in the middle of a step, come some steps after a start; those at the
    beginning of a run follow another one at once: there are none with an interval.
    """
    decks, is_begin = Decks(kinds, chance), False
    for _ in range(faults):
        if time.monotonic() > deadline:
            return
        kind = decks.kind()
        phase = decks.phase(kind, may_be_early=is_begin and not interval)
        if kind not in LOSSES or phase not in LOSSES[kind].early:
            after, pause = job.wait_for("a start", job.starts)[-1]["seconds"], chance.randrange(1, 4)
            job.wait_for(f"{pause} steps", partial(_has_done, job, pause, after))
        fault = inflict(job, kind, phase, chance)
        is_begin = kind in LOSSES and not LOSSES[kind].is_long
        yield fault
        time.sleep(max(0.0, fault.done + interval - time.monotonic()))
