"""Time that a rank spends in its own ops, without waiting for others: what health is judged by."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType

from hetu_fx.comm_ops.groups import active


class ComputeTimer:
    """Adds up the time between start and stop, less what communication waited in between."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started: float | None = None
        self._waited = 0.0

    def start(self) -> None:
        """Start counting."""
        self._started, self._waited = perf_counter(), active().seconds_waited

    def stop(self) -> None:
        """Stop counting; nothing if it has not been started."""
        if self._started is not None:
            waited = active().seconds_waited - self._waited
            self.seconds += perf_counter() - self._started - waited
            self._started = None

    def __enter__(self) -> ComputeTimer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
