"""How fast a device is that has no work: a small piece of compute, run while the others compute.

Malleus measures suspended devices so (a pair of products, over the seconds that it took at the start). How long it
may take is given, not how much it does: a device whose speed is a share of time looks fast in a moment.
"""

from __future__ import annotations

import torch

from hetu_fx.switching.step.timer import Clock, clock_of

_WIDTHS = {"cpu": 128}
_WIDTH = 1024  # of other devices: a product that is long beside its start
_AT_ONCE = 4


class Probe:
    """A product of two square matrices on a device, again and again."""

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self._device, self._clock = device, clock or clock_of(device)
        self._operand: torch.Tensor | None = None

    @torch.no_grad()
    def seconds(self, budget_seconds: float) -> float:
        """Return the seconds of one product, as measured for so long; four products at least."""
        if self._operand is None:
            width = _WIDTHS.get(self._device.type, _WIDTH)
            self._operand = torch.ones(width, width, device=self._device)
        start, elapsed, count = self._clock.now(), 0.0, 0
        while count == 0 or elapsed < budget_seconds:
            for _ in range(_AT_ONCE):
                torch.mm(self._operand, self._operand)
            count += _AT_ONCE
            elapsed = self._clock.seconds(start, self._clock.now())
        return elapsed / count
