"""How slow each device is: straggling rates from measured compute seconds, calm under noise.

A rank that did work w (a share of the model's work, or FLOPs) in t seconds of its own compute takes t / w
per unit. Its normal is the median of its first steps, as long as all are healthy (from `window` of them on, up to
`settling`). Its slowness is the median of t / w over its normal, of its last `window` steps in a row, and its rate now
is its slowness over that of healthy devices (the mean of those that are about as fast as the fastest): what slows
everybody (longer sequences, a busy host) is no straggler (Malleus' x: 1 healthy, 2 twice as slow). A rate is reported
when, for `patience` steps,

    a healthy device's rate is at least 1 + threshold                                              (1)
    a slow device's rate is below 1 + threshold - hysteresis: it is healthy again, rate 1          (2)
    a slow device's rate differs from the reported one by a factor of at least 1 + threshold       (3)

so noise below the threshold never triggers, and a device at the edge does not flap. A shift is known after few steps,
and so not well. The rate of a slow device is refined by every `lasting` steps that follow: it is the mean of what the
last `REMEMBERED` of them said since the shift, and reported again when

    it differs from the reported one by a factor of at least 1 + gap                               (4)

What a rank measures of itself beside its steps: its device's speed without work, and what its optimizers take. Devices
without work keep being measured, so that one that has become healthy again gets work again.

Every device runs a small probe before the first steps, and those that a plan leaves out run it in every step while
the others compute. Its seconds over those of the first ones are the device's slowness; they travel with the facts of
the next step. Malleus measures suspended devices so. How long a probe may take is given (a tenth of a second at most,
and a quarter of what the last step computed for, wherever that was longest), not how much it does: a device whose speed
is a share of time looks fast in a moment. What a script does between steps does not count.

Seconds that a rank's optimizers take for a step: how many passes over what it owns that is, no model knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean, median
from typing import Any

import torch

from hetu_fx.base.device_types import device_type_record
from hetu_fx.base.documents import nearest
from hetu_fx.base.frameworks import torch_optimizer
from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.errors import StateError
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
        if self._begun is not None:  # timed from the middle on: a closure's first call has made the model parallel
            self._spans.append((self._begun, self._clock.now()))


HEALTHY = 1.0

REMEMBERED = 4
"""A rate is refined by so many times `lasting` steps at most: by more it would lag behind one that drifts."""


@dataclass(slots=True)
class _Device:
    """One rank's slowness in recent steps and since a rate was reported, and what is known of its rate.

    `first` are the costs that tell its normal. `rate` is as reported, `refined` as known now, the
    mean of `refinements`; `waiting` is the age of a shift.
    """

    recent: deque[float]
    lasting: deque[float]
    first: list[float] = field(default_factory=list)
    rate: float = HEALTHY
    refined: float = HEALTHY
    refinements: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    waiting: int = 0

    def forget(self) -> None:
        """Begin new windows."""
        self.recent.clear()
        self.lasting.clear()


@dataclass(slots=True)
class HealthTracker:
    """Follows the rates of all devices; fed the same numbers, it says the same on every rank.

    Attributes:
        window: steps of the median, at least so many before anything is judged. A shift shows after half.
        lasting: steps of the median by which the rate of a slow device is refined, again and again.
        settling: steps that a normal is measured by, at most.
        threshold: how much slower than normal counts as slow.
        hysteresis: how far below the threshold a slow device must come to count as healthy again.
        patience: steps that a shift must last before it is reported.
        gap: by how much a refined rate must differ from the reported one to be reported.
    """

    window: int = 5
    lasting: int = 15
    settling: int = 30
    threshold: float = 0.25
    hysteresis: float = 0.1
    patience: int = 2
    gap: float = 0.02
    _devices: dict[int, _Device] = field(default_factory=dict)
    _is_new: bool = False

    @classmethod
    def of(cls, given: Mapping[str, float]) -> HealthTracker:
        """Return a tracker with what a user gives; `lasting` and `settling` are long enough for a given window.

        Raises `StateError` for what it does not know or cannot be.
        """
        usual = cls()
        known = {one.name: getattr(usual, one.name) for one in fields(cls) if not one.name.startswith("_")}
        for name, value in given.items():
            if name not in known:
                raise StateError(f"health has {name!r}{nearest(name, tuple(known))}")
            if isinstance(known[name], int) and value != int(value):
                raise StateError(f"health has {name} {value}\nhint: give a whole number of steps")
        own: dict[str, Any] = {n: type(known[n])(value) for n, value in given.items()}
        window = own.get("window", usual.window)
        least = {name: max(window, known[name]) for name in ("lasting", "settling")}
        return cls(**(least | own))

    def __post_init__(self) -> None:
        if self.window < 1 or self.patience < 1:
            raise StateError(f"window {self.window}, patience {self.patience}\nhint: give 1 or more of each")
        if min(self.lasting, self.settling) < self.window or self.gap <= 0:
            raise StateError(
                f"lasting is {self.lasting}, settling {self.settling}, window {self.window}, gap {self.gap}\n"
                f"hint: give lasting and settling of the window at least, and a gap above 0"
            )
        if not 0 <= self.hysteresis <= self.threshold:
            raise StateError(
                f"hysteresis is {self.hysteresis}, threshold {self.threshold}\nhint: give 0 <= hysteresis <= threshold"
            )

    @property
    def rates(self) -> dict[int, float]:
        """Return the straggling rate of each device that has been observed, as well as it is known now."""
        return {rank: device.refined for rank, device in sorted(self._devices.items())}

    @property
    def normals(self) -> dict[int, float]:
        """Return working devices' normal seconds per unit of work; empty until all are known by `lasting` steps."""
        first = {rank: device.first for rank, device in sorted(self._devices.items()) if device.first}
        if any(len(costs) < self.lasting for costs in first.values()):
            return {}
        return {rank: median(costs) for rank, costs in first.items()}

    def rescale(self, factors: Mapping[int, float]) -> None:
        """Go on with another unit of work: a device's seconds per unit are so many times what they were."""
        for rank, factor in factors.items():
            device = self._device(rank)
            device.first = [cost * factor for cost in device.first]

    def observe(
        self, seconds: Mapping[int, float], work: Mapping[int, float], standby: Mapping[int, float] | None = None
    ) -> None:
        """Take in one step: each rank's own compute seconds, and the work that it was given.

        Ranks without work or without a measurement (0 or left out) are skipped: nothing is known of them, unless
        `standby` has their slowness from elsewhere.
        """
        known = [rank for rank in sorted(work) if work[rank] > 0 and seconds.get(rank, 0.0) > 0]
        costs = {rank: seconds[rank] / work[rank] for rank in known}
        steps = self._slowness(costs)
        apart = standby or {}
        for rank, device in self._devices.items():
            if rank not in steps and rank not in apart:
                device.forget()  # medians are compared of the same steps
        working, idle = self._taken(steps), self._taken(apart)
        num_working = sum(amount > 0 for amount in work.values())
        if self._can_judge(working, num_working):
            self._judge_all(working, None if len(working) > 1 else HEALTHY)
        self._judge_all(idle, HEALTHY)

    def _can_judge(self, measured: Sequence[_Device], num_working: int) -> bool:
        """Tell whether some of the working devices tell each other's rates.

        One alone does not tell what slows everybody, nor do slow ones, of which the fastest would pass for healthy.
        """
        has_healthy = any(device.rate == HEALTHY for device in measured)
        return len(measured) == num_working or (len(measured) > 1 and has_healthy)

    def _taken(self, steps: Mapping[int, float]) -> list[_Device]:
        """Take in one step's slowness of some ranks; return those with a whole window."""
        for rank, x in steps.items():
            self._device(rank).recent.append(x)
            self._device(rank).lasting.append(x)
        devices = [self._devices[rank] for rank in steps]
        return [device for device in devices if len(device.recent) == self.window]

    def _judge_all(self, devices: Sequence[_Device], healthy: float | None) -> None:
        """Judge devices by their slowness over that of healthy ones: theirs if none is given."""
        rates = self._rates(devices, [median(device.recent) for device in devices], healthy)
        for device, rate in zip(devices, rates, strict=True):
            self._judge(device, rate)
        if devices and all(len(device.lasting) == self.lasting for device in devices):
            medians = [median(device.lasting) for device in devices]
            for device, rate in zip(devices, self._rates(devices, medians, healthy), strict=True):
                device.lasting.clear()
                self._refine(device, rate)

    def _rates(self, devices: Sequence[_Device], medians: Sequence[float], healthy: float | None) -> list[float]:
        base = self._base(devices, medians) if healthy is None else healthy
        return [x / base for x in medians]

    def _base(self, devices: Sequence[_Device], medians: Sequence[float]) -> float:
        """Return the slowness of healthy devices. One that is slow counts only if it is the fastest."""
        least = min(medians, default=HEALTHY)
        rated = zip((device.rate for device in devices), medians, strict=True)
        near = [x for rate, x in rated if rate == HEALTHY and x < least * (1 + self.threshold)]
        return fmean(near) if near else least

    def changed(self) -> dict[int, float] | None:
        """Return all rates if one of them was newly reported since the last call, else None."""
        if not self._is_new:
            return None
        self._is_new = False
        return self.rates

    def restart(self) -> None:
        """Forget recent steps, keep normals and rates: after a switch the first steps are unlike others."""
        for device in self._devices.values():
            device.forget()
            device.waiting = 0

    def refine_anew(self) -> None:
        """Refine rates by the steps from now on: work is shared out otherwise than in those before."""
        for device in self._devices.values():
            device.lasting.clear()

    def _slowness(self, costs: Mapping[int, float]) -> dict[int, float]:
        """Return ranks' costs over their normals, where those are known; go on measuring normals."""
        normals = {rank: self._normal(rank) for rank in costs}
        steps = {rank: costs[rank] / normal for rank, normal in normals.items() if normal is not None}
        calm = all(device.rate == HEALTHY for device in self._devices.values())
        most = (1 + self.threshold) * (min(steps.values()) if len(steps) > 1 else HEALTHY)
        for rank, cost in costs.items():
            device = self._devices[rank]
            if len(device.first) < self.settling and calm and steps.get(rank, most) <= most:
                device.first.append(cost)
        return steps

    def _normal(self, rank: int) -> float | None:
        first = self._device(rank).first
        return median(first) if len(first) >= self.window else None

    def _device(self, rank: int) -> _Device:
        if rank not in self._devices:
            recent, lasting = deque[float](maxlen=self.window), deque[float](maxlen=self.lasting)
            self._devices[rank] = _Device(recent, lasting)
        return self._devices[rank]

    def _judge(self, device: _Device, rate: float) -> None:
        """Report a shift of the rate once it has lasted."""
        target = self._target(device.rate, rate)
        device.waiting = 0 if target == device.rate else device.waiting + 1
        if device.waiting >= self.patience:
            device.refinements.clear()
            self._report(device, target)

    def _refine(self, device: _Device, rate: float) -> None:
        """Take what many steps say of a slow device for its rate, unless that shifts; report it by (4)."""
        if device.rate > HEALTHY and not device.waiting:
            device.refinements.append(rate)
            device.refined = round(fmean(device.refinements), 3)
            if _factor(device.refined, device.rate) >= 1 + self.gap:
                self._report(device, device.refined)

    def _report(self, device: _Device, rate: float) -> None:
        device.rate, device.refined, device.waiting, self._is_new = rate, rate, 0, True
        self.refine_anew()  # medians are compared of the same steps

    def _target(self, reported: float, rate: float) -> float:
        """Return the rate to report by (1), (2) and (3); the reported one if nothing changed."""
        slow = 1 + self.threshold
        if rate < slow - (self.hysteresis if reported > HEALTHY else 0.0):
            return HEALTHY
        if reported == HEALTHY:
            return round(rate, 3)
        return round(rate, 3) if _factor(rate, reported) >= slow else reported


def _factor(one: float, other: float) -> float:
    return max(one / other, other / one)
