"""What a plan is expected to cost: seconds and bytes per device, by term, with the reason and a runner-up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.documents import table_text
from hetu_fx.base.json_values import many, numbers
from hetu_fx.base.records import Key, record
from hetu_fx.errors import PlanError


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """One device's share of a step: `(term, seconds)` and `(term, bytes)` pairs, in display order.

    `limit_bytes` is the memory that the device has, None if nobody said.
    """

    rank: int
    seconds: tuple[tuple[str, float], ...]
    bytes: tuple[tuple[str, int], ...]
    limit_bytes: int | None = None

    @property
    def total_seconds(self) -> float:
        """Return the seconds over all terms."""
        return math.fsum(seconds for _, seconds in self.seconds)

    @property
    def total_bytes(self) -> int:
        """Return the bytes over all terms."""
        return sum(count for _, count in self.bytes)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's predicted step: seconds, terms per device, why it was chosen, and the next best plan."""

    seconds: float
    devices: tuple[DeviceCost, ...] = ()
    why: str = ""
    runner_up: str | None = None
    runner_up_seconds: float | None = None

    def __post_init__(self) -> None:
        ranks = [device.rank for device in self.devices]
        if len(set(ranks)) < len(ranks):
            raise PlanError(f"prediction names a device twice: ranks {ranks}; give one entry per device")
        check_not_negative(PlanError, "prediction", seconds=self.seconds)

    def __str__(self) -> str:
        terms = list(dict.fromkeys(t for d in self.devices for t, _ in d.seconds))
        header = ["device", "step ms", *(f"{t} ms" for t in terms), "MB"]
        rows = [_row(device, terms) for device in self.devices]
        lines = [f"predicted step: {self.seconds * 1e3:.3g} ms", table_text(header, rows)]
        if self.why:
            lines.append(self.why)
        if self.runner_up is not None:
            lines.append(f"runner-up: {self.runner_up}{self._runner_up_time()}")
        return "\n".join(lines)

    def _runner_up_time(self) -> str:
        """Say how long the runner-up takes, and by how much that is more."""
        if self.runner_up_seconds is None:
            return ""
        more = f", {100 * (self.runner_up_seconds / self.seconds - 1):+.1f} %" if self.seconds else ""
        return f" ({self.runner_up_seconds * 1e3:.3g} ms{more})"


def _row(device: DeviceCost, terms: list[str]) -> list[str]:
    seconds = dict(device.seconds)
    cells = [f"{seconds.get(term, 0.0) * 1e3:.3g}" for term in terms]
    return [str(device.rank), f"{device.total_seconds * 1e3:.3g}", *cells, f"{device.total_bytes / 1e6:.3g}"]


_DEVICE = record(
    DeviceCost,
    PlanError,
    seconds=Key(numbers(PlanError), written="always"),
    bytes=Key(numbers(PlanError, int), written="always"),
)
PREDICTION = record(Prediction, PlanError, devices=Key(many(_DEVICE.values), written="always"))
