"""Train with a fault, and see whether it shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from random import Random
from time import perf_counter
from typing import Any

import torch

from benchmarks.planted.decisions import Decisions, forget, listed, planted
from benchmarks.planted.faults import Fault, draw
from benchmarks.planted.worlds import WORLDS, World
from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, Trained, train_alone
from hetu_fx.switching.graph_execution import GraphExecution

TOLERANCE = 1e-10
HOW = Lockstep(partial(torch.optim.SGD, lr=0.1, momentum=0.9))


@dataclass(frozen=True)
class Found:
    """A fault, and what has shown it: an error by name, a difference; "" if nothing has."""

    world: str
    ranks: int
    fault: Fault
    shown: str
    seconds: float


@dataclass
class Hunt:
    """Plants faults in the decisions of one world."""

    name: str
    random: Random
    world: World = field(init=False)

    def __post_init__(self) -> None:
        self.world = WORLDS[self.name]

    def plant(self) -> Found:
        """Draw a fault, train with it, and look at what comes out."""
        fault, start = draw(self.decisions, self.random), perf_counter()
        with planted(fault.wrong):
            shown = self._shown()
        return Found(self.name, self.world.ranks, fault, shown, perf_counter() - start)

    @cached_property
    def decisions(self) -> Decisions:
        """List what is decided in a training without a fault, which must be that of one device."""
        forget()
        with listed() as found:
            shown = self._shown()
        assert not shown, f"{self.name} is wrong without a fault: {shown}"
        return found

    def _shown(self) -> str:
        model, batches = self.world.model(), self.world.batches()
        try:
            made = HOW.train(model, batches, self.world.plan, self._captured)
        except Exception as error:  # whatever it is, it shows the fault
            return type(error).__name__
        verdict = judge(self.name, self._alone, made, TOLERANCE, "")
        return "" if verdict.verdict == "equal" else "another number"

    @cached_property
    def _alone(self) -> Trained:
        return train_alone(self.world.model(), self.world.batches(), HOW)

    @cached_property
    def _captured(self) -> GraphExecution:
        return HOW.capture(self.world.model(), self.world.batches()[0])


def row_of(found: Found) -> dict[str, Any]:
    """Return what is to be said of a fault."""
    return {
        "world": found.world,
        "ranks": found.ranks,
        "fault": found.fault.kind,
        "in": found.fault.family,
        "place": found.fault.place,
        "shown by": found.shown or "NOTHING",
        "seconds": round(found.seconds, 2),
    }
