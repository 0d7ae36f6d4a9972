"""What a run of the demo measured, as values; written by rank 0, read by the process that started the ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hetu_fx.base.documents import read_json, told_as_damaged, write_atomically
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.show.timeline import Event, Timeline


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step as rank 0 saw it: its `seconds`, its `longest` sequence, the devices' `rates` by then."""

    step: int
    loss: float
    seconds: float
    tokens: int
    longest: int
    variant: str
    rates: Mapping[int, float]

    @property
    def tokens_per_second(self) -> float:
        """Return predicted tokens per second of this step."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens and seconds of some steps of the data-parallel comparison."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        """Return the median over the steps."""
        return median(t / s for t, s in zip(self.tokens, self.seconds, strict=True))


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All that the ranks measured.

    Attributes:
        records: the training steps.
        slowed, slowed_rank: what was done to slow a device down, and which one it was.
        even_shares: DDP on the devices as they were at first, and with the slowed one ("healthy", "slowed").
        plans: the variants' plans, as JSON, by name.
        measured, predicted: timelines: of the training steps, and simulated for the first plan.
        held_out_loss: of a batch that was not trained on, by the parallel model at the end.
        weights: hash of the parallel model's final parameters.
        num_parameters: of the model.
    """

    records: tuple[StepRecord, ...]
    slowed: str
    slowed_rank: int
    even_shares: Mapping[str, Throughput]
    plans: Mapping[str, Any]
    measured: Timeline
    predicted: Timeline
    held_out_loss: float
    weights: str
    num_parameters: int

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        write_atomically(path, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RunRecord:
        """Read what `write` wrote. Raises EnvironmentProblem."""
        raw = read_json(path, EnvironmentProblem)
        with told_as_damaged(os.fspath(path), EnvironmentProblem):
            raw["records"] = tuple(_read_step(record) for record in raw["records"])
            raw["even_shares"] = {state: _read_throughput(t) for state, t in raw["even_shares"].items()}
            raw["measured"], raw["predicted"] = map(_read_timeline, (raw["measured"], raw["predicted"]))
            return cls(**raw)

    @property
    def new_plans(self) -> frozenset[str]:
        """Return the variants that were made for the slowed device: when they first ran, it was known as slow."""
        first: dict[str, StepRecord] = {}
        for record in self.records:
            first.setdefault(record.variant, record)
        return frozenset(v for v, record in first.items() if record.rates.get(self.slowed_rank, 1.0) > 1.0)


def steady(records: Iterable[StepRecord], longest: int) -> list[StepRecord]:
    """Return the steps with usual batches, without the first of each variant (which makes its graphs)."""
    seen: set[str] = set()
    found = []
    for record in records:
        if record.variant in seen and record.longest <= longest:
            found.append(record)
        seen.add(record.variant)
    return found


def throughput(records: Iterable[StepRecord]) -> float | None:
    """Return the median tokens per second of some steps; None without steps."""
    values = [record.tokens_per_second for record in records]
    return median(values) if values else None


def _read_step(raw: dict[str, Any]) -> StepRecord:
    rates = {int(rank): rate for rank, rate in raw["rates"].items()}
    return StepRecord(**{**raw, "rates": rates})


def _read_throughput(raw: dict[str, Any]) -> Throughput:
    return Throughput(tuple(raw["tokens"]), tuple(raw["seconds"]))


def _read_timeline(raw: dict[str, Any]) -> Timeline:
    return Timeline(tuple(Event(**event) for event in raw["events"]), raw["name"])
