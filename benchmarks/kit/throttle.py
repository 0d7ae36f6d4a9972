"""How much of a process's time is withheld from it while it computes: the slowdown that a quota really injects.

A quota of a third of a core is not a rate of exactly 3. The kernel counts by ticks, and a stretch of compute begins
somewhere in a period, with what is left of it. So the slowdown is measured, in the very stretches that the runtime
times: their seconds over those for which the thread was on a core.
"""

from __future__ import annotations

import time

Moment = tuple[float, float]


class ThrottleClock:
    """A clock for `Runtime.clock` that tells time as always, and beside it how much of it the thread was on a core."""

    def __init__(self) -> None:
        self._seconds = self._on_core = 0.0

    def now(self) -> Moment:
        """Return the host's time, and the thread's."""
        return time.perf_counter(), time.thread_time()

    def seconds(self, start: Moment, end: Moment) -> float:
        """Return the host's seconds between two moments; remember both differences."""
        elapsed = end[0] - start[0]
        self._seconds += elapsed
        self._on_core += end[1] - start[1]
        return elapsed

    def taken(self) -> float:
        """Return seconds over seconds on a core, of all stretches since the last call; 1 if there were none."""
        factor = self._seconds / self._on_core if self._on_core else 1.0
        self._seconds = self._on_core = 0.0
        return factor
