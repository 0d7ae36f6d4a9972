"""What a plan is expected to cost: seconds and bytes per device, by term, with the reason and a runner-up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.documents import Fields, kind_of, table_text
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

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this cost."""
        result = {"rank": self.rank, "seconds": dict(self.seconds), "bytes": dict(self.bytes)}
        return result if self.limit_bytes is None else result | {"limit_bytes": self.limit_bytes}


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

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `read_prediction` reads."""
        result: dict[str, Any] = {"seconds": self.seconds, "devices": [d.to_json() for d in self.devices]}
        optional = {"why": self.why, "runner_up": self.runner_up, "runner_up_seconds": self.runner_up_seconds}
        return result | {key: value for key, value in optional.items() if value not in (None, "")}

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


def read_prediction(value: Mapping[str, Any], where: str) -> Prediction:
    """Read the `predicted` section of a plan file; raise `PlanError` for anything that is not one."""
    keys = ("seconds", "devices", "why", "runner_up", "runner_up_seconds")
    fields = Fields(value, where, PlanError, keys)
    devices = fields.objects("devices", ())
    return Prediction(
        seconds=fields.number("seconds"),
        devices=tuple(_read_device(d, f"{where}.devices[{i}]") for i, d in enumerate(devices)),
        why=fields.text("why", ""),
        runner_up=fields.text("runner_up", None),
        runner_up_seconds=fields.number("runner_up_seconds", None),
    )


def _read_device(value: Mapping[str, Any], where: str) -> DeviceCost:
    fields = Fields(value, where, PlanError, ("rank", "seconds", "bytes", "limit_bytes"))
    seconds, counts = fields.mapping("seconds"), fields.mapping("bytes")
    for key, number in (*seconds.items(), *counts.items()):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise PlanError(f"{where}: term {key!r} must be a number, not {kind_of(number)}")
    return DeviceCost(
        rank=fields.integer("rank"),
        seconds=tuple((term, float(number)) for term, number in seconds.items()),
        bytes=tuple((term, int(number)) for term, number in counts.items()),
        limit_bytes=fields.integer("limit_bytes", None),
    )
