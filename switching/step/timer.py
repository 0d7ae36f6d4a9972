"""Time that a rank spends in its own ops, without waiting for others: what health is judged by.

A GPU works on while its host is ahead, so that its time is told by events on its stream, not by the host's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

import torch

from hetu_fx.base.device_types import device_type_record
from hetu_fx.comm_ops.wire.groups import set_working


class Clock(Protocol):
    """Marks moments of a device, and tells the time between them."""

    def now(self) -> Any:
        """Mark the moment at which the device has done what it was given so far."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two moments, once the device has come to the second."""

    def is_past(self, moment: Any) -> bool:
        """Tell whether the device has come to a moment."""


class HostClock:
    """The clock of a device that does what it is given at once."""

    def now(self) -> float:
        """Return the host's time."""
        return perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the difference."""
        return end - start

    def is_past(self, moment: float) -> bool:
        """Tell that it has: what has been marked is over."""
        return True


class StreamClock:
    """The clock of a device that has a stream of work; `events` is the module that makes them."""

    def __init__(self, device: torch.device, events: Any) -> None:
        self._device, self._module = device, events

    def now(self) -> Any:
        """Put an event on the stream that the work is on."""
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Wait until the second event has happened; return the time between them."""
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3

    def is_past(self, moment: Any) -> bool:
        """Ask the event."""
        past: bool = moment.query()
        return past


def find_clock(device: torch.device) -> Clock:
    """Return the clock by which work on a device is timed."""
    events = device_type_record(device).events
    return HostClock() if events is None else StreamClock(device, events())


class HostTime:
    """What the host spends in the calls of steps besides the model's own ops, and besides waiting for other ranks.

    It is what a device that works beside its host may be kept waiting by. What is done in the hooks of a backward,
    where gradients are handed on, counts as the model's.

    Args:
        waited: tells for how many seconds this rank has waited for others so far.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited, self.seconds = waited, 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is inside."""
        start = self.now()
        try:
            yield
        finally:
            self.seconds += self.now() - start

    def exclude_since(self, start: float) -> None:
        """Leave out what was done since a moment."""
        self.seconds -= self.now() - start

    def now(self) -> float:
        """Return the moment, on a clock that stands while this rank waits."""
        return perf_counter() - self._waited()


class ComputeTimer:
    """Adds up the time between the first start and the last stop of each stretch, less what communication pauses.

    Parts of a step may be backward at once: what is started twice goes on until it is stopped twice.

    As a context manager it counts ops of the model alone, which are left out of the host's own time.

    Args:
        clock: of the device.
        host: the host's own time.

    Attributes:
        share: of the work that a step is known to have, the part that this rank has not been spared.
        spans: from when to when it has counted, by moments of the clock.
    """

    def __init__(self, clock: Clock | None = None, host: HostTime | None = None) -> None:
        self._clock, self._host, self._entered = clock or HostClock(), host, 0.0
        self._counted, self._summed = 0.0, 0
        self.spans: list[tuple[Any, Any]] = []
        self._since: Any = None
        self._starts = self._pauses = 0
        self.share = 1.0

    @property
    def seconds(self) -> float:
        """The time so far; waits until the device has done what was timed."""
        self._counted += sum(self._clock.seconds(*span) for span in self.spans[self._summed :])
        self._summed = len(self.spans)
        return self._counted

    @property
    def is_known(self) -> bool:
        """Whether `seconds` is there without waiting for the device."""
        return all(self._clock.is_past(end) for _, end in self.spans[self._summed :])

    def start(self) -> None:
        """Start counting; nothing but to be stopped once more if it counts."""
        self._starts += 1
        if self._starts == 1:
            self._pauses, self._since = 0, self._clock.now()
            set_working(self)

    def stop(self) -> None:
        """Stop counting, once for every start; nothing if it has not been started."""
        if self._starts == 1:
            self._close()
            set_working(None)
        self._starts = max(0, self._starts - 1)

    def pause(self) -> None:
        """Leave out what follows, until as many calls of `resume`."""
        self._pauses += 1
        self._close()

    def resume(self) -> None:
        """Count again, unless another pause lasts."""
        self._pauses -= 1
        if self._pauses == 0:
            self._since = self._clock.now()

    def _close(self) -> None:
        if self._since is not None:
            self.spans.append((self._since, self._clock.now()))
            self._since = None

    def __enter__(self) -> ComputeTimer:
        self.start()
        if self._host is not None:
            self._entered = self._host.now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._host is not None:
            self._host.exclude_since(self._entered)
        self.stop()
