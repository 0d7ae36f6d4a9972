"""The demo's unequal devices, from inside one of them: made unequal, one slowed down, made equal again.

All calls are collective. With CPU quotas a device's speed is set; without (an ordinary user) slow devices share
a core from the start, and a device is slowed down by another process that competes for its core.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import torch.distributed as dist

from examples.demo.settings import DemoSettings
from hetu_fx_emulate.emulate import change_speed, current_speeds, lift_speeds

# Ends with its parent, or after its time, whatever happens.
_COMPETITOR = """
import os, sys, time
parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
while os.getppid() == parent and time.monotonic() < end:
    sum(range(100_000))
"""
_COMPETES_SECONDS = 600


class Devices:
    """What the demo does to the devices that it runs on.

    Here, without quotas, they stay as they are, pinned to cores, slow ones to a core they share from the start.

    Attributes:
        slowed_rank: the device that can be slowed down, here the fastest one.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self.settings, self.slowed_rank = settings, settings.speeds.index(max(settings.speeds))
        self._competitor: subprocess.Popen[bytes] | None = None

    def slow(self) -> str:
        """Slow one device down, here by a process on its core; say what was done."""
        if dist.get_rank() == self.slowed_rank:
            command = (sys.executable, "-I", "-c", _COMPETITOR, str(_COMPETES_SECONDS))
            self._competitor = subprocess.Popen(command)
        return f"device {self.slowed_rank} shares its core with another process"

    def heal(self) -> None:
        """Undo `slow`."""
        if self._competitor is not None:
            self._competitor.kill()
            self._competitor.wait()
            self._competitor = None
        dist.barrier()

    def make_unequal(self) -> None:
        """Give every device its own speed, where that can be done."""

    def lift_speeds(self) -> None:
        """Let all share all cores, for what is not measured, where that can be done."""


class Quotas(Devices):
    """Devices whose speeds are CPU quotas; the settings say which one can be slowed down."""

    def __init__(self, settings: DemoSettings) -> None:
        self.settings, self.slowed_rank = settings, settings.slowed_rank

    def slow(self) -> str:
        rank, speed, before = self.slowed_rank, self.settings.slowed_speed, self.settings.speeds
        _set_speeds([speed if other == rank else before[other] for other in range(len(before))])
        return f"device {rank} slowed from {before[rank]:g} to {speed:g} cores"

    def heal(self) -> None:
        self.make_unequal()

    def make_unequal(self) -> None:
        _set_speeds(self.settings.speeds)

    def lift_speeds(self) -> None:
        _on_rank_0(lift_speeds)


def _set_speeds(speeds: Sequence[float]) -> None:
    def change() -> None:
        for rank in changes(current_speeds(), speeds):
            change_speed(rank, speeds[rank])

    _on_rank_0(change)


def _on_rank_0(change: Callable[[], None]) -> None:
    """Have rank 0 change the speeds, while nobody computes."""
    dist.barrier()
    if dist.get_rank() == 0:
        change()
    dist.barrier()


def changes(before: Sequence[float], after: Sequence[float]) -> list[int]:
    """Return the ranks whose speed changes, those that become slower first: the sum must fit at every moment."""
    changed = [rank for rank in range(len(after)) if after[rank] != before[rank]]
    return sorted(changed, key=lambda rank: after[rank] - before[rank])
