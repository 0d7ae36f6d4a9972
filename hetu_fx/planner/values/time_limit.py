"""The time that a search has."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class TimeLimit:
    """A moment after which searches give what they have found.

    `cut` tells whether a search did: only then might its answer be another one with more time.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without seconds it never comes."""
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds
        self.cut = False

    def ends(self, has_found: object) -> bool:
        """Tell a search that could go on whether to stop: never before it has found something."""
        if not has_found or self._clock() < self._end:
            return False
        self.cut = True
        return True
