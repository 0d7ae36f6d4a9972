"""Seconds that a rank's optimizers take for a step: how many passes over what it owns that is, no model knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hetu_fx.switching.step.timer import Clock


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

    def listen_to(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Time the steps of these from now on, too."""
        for given in optimizers:
            optimizer = getattr(given, "optimizer", given)  # accelerate wraps them in one without hooks of its own
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
