"""What a plan is expected to cost: seconds and bytes per device, by term, with the reason and a runner-up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.json_values import many, numbers
from hetu_fx.base.records import Key, record
from hetu_fx.base.words import ranks_text, seconds_text
from hetu_fx.errors import PlanError
from hetu_fx.show.table import table_text


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
    """A plan's predicted step: seconds, terms per device, why it was chosen, and the next best plan.

    `bound_seconds` stands where a search gave its best so far as its time was over: no plan takes less than that.
    `formula_seconds` is what the step would take if nothing overlapped but sums and the products beside them, which is
    what the devices' terms add up to; None where `seconds` are that. `left_out` are the devices of the cluster that
    the plan does not use, `left_out_why` says of each kind of them what they would cost and what brings them in.
    """

    seconds: float
    devices: tuple[DeviceCost, ...] = ()
    why: str = ""
    runner_up: str | None = None
    runner_up_seconds: float | None = None
    bound_seconds: float | None = None
    formula_seconds: float | None = None
    left_out: tuple[int, ...] = ()
    left_out_why: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ranks = [device.rank for device in self.devices]
        if len(set(ranks)) < len(ranks):
            raise PlanError(f"prediction names a device twice: ranks {ranks}\nhint: give one entry per device")
        check_not_negative(PlanError, "prediction", seconds=self.seconds)
        if self.formula_seconds is not None:
            check_not_negative(PlanError, "prediction", formula_seconds=self.formula_seconds)

    def __str__(self) -> str:
        return self.text()

    def text(self, told: Sequence[int] = ()) -> str:
        """Return it for people, with the seconds of some devices; left out: a row for all that take the same."""
        lines = [f"predicted step: {seconds_text(self.seconds)}{self._terms()}", *self._table(told)]
        if self.why:
            lines.append(self.why)
        if self.bound_seconds is not None:
            lines.append(self._bound_text(self.bound_seconds))
        if self.runner_up is not None:
            lines.append(f"runner-up: {self.runner_up}{self._runner_up_time()}")
        return "\n".join(lines)

    def _table(self, told: Sequence[int]) -> Iterator[str]:
        """Yield the table of seconds by term, which add up to the formula's step; none that nobody has."""
        spent = {term: seconds for device in self.devices for term, seconds in device.seconds if seconds}
        terms = [term for term in dict.fromkeys(t for d in self.devices for t, _ in d.seconds) if term in spent]
        if terms:
            costs = {device.rank: device for device in self.devices}
            rows = [[str(rank), *_cells(costs[rank], terms)] for rank in told] or list(_folded(self.devices, terms))
            yield table_text(["busiest" if told else "device", *(_SHORT.get(term, term) for term in terms)], rows)

    def _bound_text(self, bound: float) -> str:
        """Say that the plan is the best so far, and how far from the best it may be."""
        gap = f", {100 * (1 - bound / self.seconds):.3g} % less than this one" if self.seconds else ""
        return (
            f"best so far: the time of the search was over; no plan takes less than {seconds_text(bound)}{gap} "
            f"(all work at the speed of all devices; memory and messages left out)"
        )

    def _terms(self) -> str:
        """Say what the terms below it add up to, where that is clearly something else."""
        terms = self.seconds if self.formula_seconds is None else self.formula_seconds
        if abs(terms - self.seconds) <= _CLOSE * self.seconds:
            return ""
        why = "overlap hides the rest" if terms > self.seconds else "the rest is waiting"
        return f" (terms add up to {seconds_text(terms)}; {why})"

    def _runner_up_time(self) -> str:
        """Say how long the runner-up takes, and by how much that is more."""
        if self.runner_up_seconds is None:
            return ""
        more = f", {100 * (self.runner_up_seconds / self.seconds - 1):+.1f} %" if self.seconds else ""
        return f" ({seconds_text(self.runner_up_seconds)}{more})"


_CLOSE = 0.02  # shares of the step below which two of its figures are one to readers

_SHORT = {"tensor_parallel": "tensor", "hand_over": "hand-over", "gradient_sync": "sync"}
"""What terms are called at the head of a table."""


def _cells(device: DeviceCost, terms: Sequence[str]) -> list[str]:
    seconds = dict(device.seconds)
    return [seconds_text(seconds.get(term, 0.0)) for term in terms]


def _folded(devices: Iterable[DeviceCost], terms: Sequence[str]) -> Iterator[list[str]]:
    """Yield the rows of a table, those whose cells are the same as one."""
    found: dict[tuple[str, ...], list[int]] = {}
    for device in devices:
        found.setdefault(tuple(_cells(device, terms)), []).append(device.rank)
    yield from ([ranks_text(ranks), *cells] for cells, ranks in found.items())


_DEVICE = record(
    DeviceCost,
    PlanError,
    seconds=Key(numbers(PlanError), written="always"),
    bytes=Key(numbers(PlanError, int), written="always"),
)
PREDICTION = record(Prediction, PlanError, devices=Key(many(_DEVICE.values), written="always"))
