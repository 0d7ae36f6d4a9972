"""How slow each device is: straggling rates from measured compute seconds, calm under noise.

A rank that did work w (a share of the model's work, or FLOPs) in t seconds of its own compute takes t / w
per unit. Its normal is the median of its first `window` steps, or given. Its slowness is the median of t / w over
its normal, of its last `window` steps in a row, and its rate now is its slowness over the least of all ranks: what
slows everybody (longer sequences, a busy host) is no straggler (Malleus' x: 1 healthy, 2 twice as slow). The least
of medians, not of single steps: that would be too small by the noise of a step. A rate is reported when, for
`patience` steps,

    a healthy device's rate is at least 1 + threshold                                              (1)
    a slow device's rate is below 1 + threshold - hysteresis: it is healthy again, rate 1          (2)
    a slow device's rate differs from the reported one by a factor of at least 1 + threshold       (3)

so noise below the threshold never triggers, and a device at the edge does not flap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from hetu_fx.errors import StateError

HEALTHY = 1.0


@dataclass(slots=True)
class _Device:
    """One rank's recent slowness, its normal and the first costs that tell it, reported rate, age of a shift."""

    recent: deque[float]
    normal: float | None
    first: list[float] = field(default_factory=list)
    rate: float = HEALTHY
    waiting: int = 0


@dataclass(slots=True)
class HealthTracker:
    """Follows the rates of all devices; fed the same numbers, it says the same on every rank.

    Attributes:
        window: steps of the median, at least so many before anything is judged. A shift shows after half.
        threshold: how much slower than normal counts as slow.
        hysteresis: how far below the threshold a slow device must come to count as healthy again.
        patience: steps that a shift must last before it is reported.
        normal: seconds per unit of work of healthy devices; measured in the first `window` steps if left out.
    """

    window: int = 5
    threshold: float = 0.25
    hysteresis: float = 0.1
    patience: int = 2
    normal: Mapping[int, float] = field(default_factory=dict)
    _devices: dict[int, _Device] = field(default_factory=dict)
    _is_new: bool = False

    def __post_init__(self) -> None:
        if self.window < 1 or self.patience < 1:
            raise StateError(f"window {self.window}, patience {self.patience}; give 1 or more of each")
        if not 0 <= self.hysteresis <= self.threshold:
            raise StateError(
                f"hysteresis is {self.hysteresis}, threshold {self.threshold}; give 0 <= hysteresis <= threshold"
            )

    @property
    def rates(self) -> dict[int, float]:
        """Return the reported straggling rate of each device that has been observed."""
        return {rank: device.rate for rank, device in sorted(self._devices.items())}

    @property
    def normals(self) -> dict[int, float]:
        """Return each working device's normal seconds per unit of work; empty until all of them are known."""
        worked = ((rank, device) for rank, device in sorted(self._devices.items()) if device.normal or device.first)
        found = {rank: device.normal for rank, device in worked}
        known = {rank: normal for rank, normal in found.items() if normal is not None}
        return known if len(known) == len(found) else {}

    def observe(
        self, seconds: Mapping[int, float], work: Mapping[int, float], standby: Mapping[int, float] | None = None
    ) -> None:
        """Take in one step: each rank's own compute seconds, and the work that it was given.

        Ranks without work or without a measurement (0 or left out) are skipped: nothing is known of them, unless
        `standby` has their slowness from elsewhere.
        """
        known = [rank for rank in sorted(work) if work[rank] > 0 and seconds.get(rank, 0.0) > 0]
        costs = {rank: seconds[rank] / work[rank] for rank in known}
        steps = {rank: x for rank, cost in costs.items() if (x := self._slowness(rank, cost)) is not None}
        apart = standby or {}
        for rank, device in self._devices.items():
            if rank not in steps and rank not in apart:
                device.recent.clear()  # medians are compared of the same steps
        slowness = self._medians(steps)
        num_working = sum(amount > 0 for amount in work.values())
        if len(slowness) >= min(2, num_working):  # or what slows everybody cannot be told
            least = min(slowness.values()) if len(slowness) > 1 else 1.0
            for rank, x in slowness.items():
                self._judge(self._devices[rank], x / least)
        for rank, x in self._medians(apart).items():
            self._judge(self._devices[rank], x)

    def _medians(self, steps: Mapping[int, float]) -> dict[int, float]:
        """Take in one step's slowness of some ranks; return the medians of those with a whole window."""
        for rank, x in steps.items():
            self._device(rank).recent.append(x)
        recent = {rank: self._devices[rank].recent for rank in steps}
        return {rank: median(steps) for rank, steps in recent.items() if len(steps) == self.window}

    def changed(self) -> dict[int, float] | None:
        """Return all rates if one of them was newly reported since the last call, else None."""
        if not self._is_new:
            return None
        self._is_new = False
        return self.rates

    def restart(self) -> None:
        """Forget recent steps, keep normals and rates: after a switch the first steps are unlike others."""
        for device in self._devices.values():
            device.recent.clear()
            device.waiting = 0

    def _slowness(self, rank: int, cost: float) -> float | None:
        """Return a rank's cost over its normal, or None while the normal is being measured."""
        device = self._device(rank)
        if device.normal is not None:
            return cost / device.normal
        device.first.append(cost)
        if len(device.first) == self.window:
            device.normal = median(device.first)
        return None

    def _device(self, rank: int) -> _Device:
        if rank not in self._devices:
            self._devices[rank] = _Device(deque(maxlen=self.window), self.normal.get(rank))
        return self._devices[rank]

    def _judge(self, device: _Device, rate: float) -> None:
        """Report a shift of the rate once it has lasted."""
        target = self._target(device.rate, rate)
        device.waiting = 0 if target == device.rate else device.waiting + 1
        if device.waiting >= self.patience:
            device.rate, device.waiting, self._is_new = target, 0, True

    def _target(self, reported: float, rate: float) -> float:
        """Return the rate to report by (1), (2) and (3); the reported one if nothing changed."""
        slow = 1 + self.threshold
        if rate < slow - (self.hysteresis if reported > HEALTHY else 0.0):
            return HEALTHY
        if reported == HEALTHY:
            return round(rate, 3)
        ratio = max(rate / reported, reported / rate)
        return round(rate, 3) if ratio >= slow else reported
