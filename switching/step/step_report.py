"""What a step leaves behind, for statistics and for the caller; what changes of variant have cost."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from hetu_fx.planner.dispatch.assignment import BatchPlan
from hetu_fx.switching.step.execution import Work
from hetu_fx.switching.step.loss import SeenLoss
from hetu_fx.switching.step.timer import ComputeTimer

RECENT = 64
"""Medians are over so many of the newest steps of a kind."""


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """What a change to a variant costs on this rank: medians of recent training steps; None where there were none.

    A step takes from its start to that of the next batch, so that its backward and the optimizer's step are in it, and
    reading data, which is there with and without a change. Steps that made graphs are apart: `warm` avoids them.

    Attributes:
        changes: how many steps came after a change and made no graphs.
        stayed_seconds: of steps of the variant after another step of it.
        changed_seconds: of steps after a change that made no graphs.
        built_seconds: of steps that made graphs.
    """

    changes: int
    stayed_seconds: float | None
    changed_seconds: float | None
    built_seconds: float | None

    @property
    def share(self) -> float | None:
        """Return by which share of a step the steps after a change are longer: 0.05 is 5 %."""
        if self.stayed_seconds is None or self.changed_seconds is None:
            return None
        return self.changed_seconds / self.stayed_seconds - 1.0


class StepTimes:
    """Takes in when batches begin, and what they were; tells what changes cost."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._changes: dict[str, int] = defaultdict(int)
        self._begun, self._switches = 0.0, 0
        self._under_way: tuple[str, str] | None = None

    def begin(self, now: float) -> None:
        """End the step before, if it was one of training; a batch begins."""
        if self._under_way is not None:
            self._seconds[self._under_way].append(now - self._begun)
        self._begun, self._under_way = now, None

    def train(self, variant: str, switches: int, *, builds: bool) -> None:
        """Tell that the batch that has begun is a training step, after so many changes of variant since the start."""
        kind = "built" if builds else "stayed" if switches == self._switches else "changed"
        self._changes[variant] += kind == "changed"
        self._under_way, self._switches = (variant, kind), switches

    def cost(self, variant: str) -> SwitchCost:
        """Return what changes to a variant have cost."""
        stayed, changed, built = (self._median(variant, kind) for kind in ("stayed", "changed", "built"))
        return SwitchCost(self._changes[variant], stayed, changed, built)

    def _median(self, variant: str, kind: str) -> float | None:
        seconds = self._seconds.get((variant, kind))
        return median(seconds) if seconds else None


@dataclass
class LastStep:
    """What the last step did: for `model.hetu.stats`; `planned` and `work` if sequences had lengths of their own.

    `host_seconds` are known once the next batch begins: backward is in them.
    """

    variant: str = ""
    rows: tuple[int, ...] = ()
    timer: ComputeTimer = field(default_factory=ComputeTimer)
    planned: BatchPlan | None = None
    work: Work | None = None
    loss: SeenLoss = field(default_factory=SeenLoss)
    host_seconds: float = 0.0
