"""What a rank measures of itself beside its steps: its device's speed without work, and what its optimizers take.

Devices without work keep being measured, so that one that has become healthy again gets work again.

Every device runs a small probe before the first steps, and those that a plan leaves out run it in every step while
the others compute. Its seconds over those of the first ones are the device's slowness; they travel with the facts of
the next step. Malleus measures suspended devices so. How long a probe may take is given (a tenth of a second at most,
and a quarter of what the last step computed for, wherever that was longest), not how much it does: a device whose speed
is a share of time looks fast in a moment. What a script does between steps does not count.

Seconds that a rank's optimizers take for a step: how many passes over what it owns that is, no model knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from hetu_fx.base.device_types import device_type_record
from hetu_fx.base.frameworks import torch_optimizer
from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.switching.step.timer import Clock, find_clock

PROBE_SECONDS = 0.1
PROBE_SHARE = 0.25


@dataclass
class Baselines:
    """The seconds of each device's first `count` probes; fed the same numbers, the same on every rank."""

    count: int
    _first: dict[int, list[float]] = field(default_factory=dict)

    def take(self, probes: Mapping[int, float]) -> None:
        """Take in the probes of a step, of those devices that ran one (more than 0 seconds)."""
        for rank, seconds in probes.items():
            first = self._first.setdefault(rank, [])
            if seconds > 0 and len(first) < self.count:
                first.append(seconds)

    def is_known(self, rank: int) -> bool:
        """Tell whether a device has run its first probes."""
        return len(self._first.get(rank, ())) == self.count

    def slowness(self, probes: Mapping[int, float], working: Collection[int]) -> dict[int, float]:
        """Return the slowness of the devices that ran a probe in a step and had no work in it."""
        idle = {rank: s for rank, s in probes.items() if s > 0 and rank not in working and self.is_known(rank)}
        return {rank: seconds / median(self._first[rank]) for rank, seconds in idle.items()}


class Standby:
    """Runs this rank's probes, and tells of them.

    Args:
        rank: this one.
        probe: of its device.
        count: how many probes make the baseline.
    """

    def __init__(self, rank: int, probe: Probe, count: int) -> None:
        self.rank, self.probe, self.baselines = rank, probe, Baselines(count)
        self._seconds = 0.0
        self._longest_seconds = 0.0

    def told_seconds(self) -> float:
        """Return what this rank's last probe took, once; 0 if it has run none since."""
        told, self._seconds = self._seconds, 0.0
        return told

    def observe(self, facts: StepFacts, working: Collection[int]) -> dict[int, float]:
        """Take in all ranks' probes; return the slowness of those without work. Runs one of the first probes.

        A device that is alone is never without work, and runs none.
        """
        self._longest_seconds = max(facts.compute_seconds, default=self._longest_seconds)
        probes = dict(enumerate(facts.probe_seconds))
        self.baselines.take(probes)
        if len(probes) > 1 and not self.baselines.is_known(self.rank):
            self.run()
        return self.baselines.slowness(probes, working)

    def run(self) -> None:
        """Measure how fast this device is now."""
        self._seconds = self.probe.seconds(min(PROBE_SECONDS, PROBE_SHARE * self._longest_seconds))


_PART = 2  # of the side of a product that takes about a millisecond: still long beside its start
_AT_ONCE = 4


class Probe:
    """A product of two square matrices on a device, again and again."""

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self._device, self._clock = device, clock or find_clock(device)
        self._operand: torch.Tensor | None = None

    @torch.no_grad()
    def seconds(self, budget_seconds: float) -> float:
        """Return the seconds of one product, as measured for so long; four products at least."""
        if self._operand is None:
            side = device_type_record(self._device).product_side // _PART
            self._operand = torch.ones(side, side, device=self._device)
        start, elapsed, count = self._clock.now(), 0.0, 0
        while count == 0 or elapsed < budget_seconds:
            for _ in range(_AT_ONCE):
                torch.mm(self._operand, self._operand)
            count += _AT_ONCE
            elapsed = self._clock.seconds(start, self._clock.now())
        return elapsed / count


class UpdateTimes:
    """Adds up the seconds of optimizers' steps on this rank.

    Args:
        clock: of the device that parameters are on.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: list[torch.optim.Optimizer] = []
        self._begun: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def time_steps_of(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Time the steps of these from now on, too."""
        for given in optimizers:
            optimizer = torch_optimizer(given)
            if all(optimizer is not known for known in self._known):
                self._known.append(optimizer)
                optimizer.register_step_pre_hook(self._begin)
                optimizer.register_step_post_hook(self._end)

    def taken(self) -> float:
        """Return the seconds of the steps since the last call; waits until the device has done them."""
        spans, self._spans = self._spans, []
        return sum(self._clock.seconds(*span) for span in spans)

    def _begin(self, *_: object) -> None:
        self._begun = self._clock.now()

    def _end(self, *_: object) -> None:
        self._spans.append((self._begun, self._clock.now()))
