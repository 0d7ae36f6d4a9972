"""Which variant runs a batch: a pure function of what every rank knows, so all ranks choose alike.

The function can be replaced (`model.hetu.policy`); `choose` is the one that there is.

A variant fits a batch whose longest sequence is at most its `max_length`. Of those that fit, the one that is
expected to be fastest runs it. A variant expects a straggling rate of each of its devices; where a device is
slower by now, the variant is slower by as much as its worst device, for everybody waits for that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hetu_fx.errors import BatchError


@dataclass(frozen=True, slots=True)
class VariantFacts:
    """What the choice needs of a variant.

    Attributes:
        name: the variant's name.
        max_length: the longest sequence that it takes; None for any.
        predicted_seconds: of a step, at the rates it was planned for; 0 if nobody predicted it.
        devices: the ranks that it uses (left out: the current rates do not matter to it).
        planned_rates: the straggling rates that it was planned for, of those that are not 1.
    """

    name: str
    max_length: int | None = None
    predicted_seconds: float = 0.0
    devices: tuple[int, ...] = ()
    planned_rates: Mapping[int, float] = field(default_factory=dict)

    def fits(self, batch: BatchFacts) -> bool:
        """Tell whether the variant takes the batch."""
        return self.max_length is None or batch.longest <= self.max_length

    def seconds(self, health: Health) -> float:
        """Return the predicted seconds, with the devices as they are now."""
        worst = (health.rate(d) / self.planned_rates.get(d, 1.0) for d in self.devices)
        return self.predicted_seconds * max(1.0, max(worst, default=1.0))


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What the choice needs of a batch: its longest sequence and its rows, over all ranks."""

    longest: int
    rows: int


@dataclass(frozen=True, slots=True)
class Health:
    """The devices' straggling rates now (time over normal time), of those that are not 1."""

    rates: Mapping[int, float] = field(default_factory=dict)

    def rate(self, device: int) -> float:
        """Return a device's straggling rate."""
        return self.rates.get(device, 1.0)


HEALTHY = Health()


class Policy(Protocol):
    """Chooses the variant that runs a batch.

    Every rank calls it with the same arguments before every batch and must get the same name: it may look at nothing
    else that differs between ranks, such as clocks or generators that were seeded by rank.
    """

    def __call__(self, variants: Sequence[VariantFacts], batch: BatchFacts, health: Health, /) -> str:
        """Return the name of one of the variants, which takes the batch."""
        ...


def choose(variants: Sequence[VariantFacts], batch: BatchFacts, health: Health = HEALTHY) -> str:
    """Return the name of the variant that runs the batch.

    Where a variant that fits was never predicted (a plan given by hand), times cannot be compared: then the
    one made for the shortest sequences that still fits is chosen, the first of equals.

    Raises:
        BatchError: if no variant fits.
    """
    fitting = [variant for variant in variants if variant.fits(batch)]
    if not fitting:
        limits = {variant.name: variant.max_length for variant in variants}
        raise BatchError(
            f"no variant takes a batch whose longest sequence is {batch.longest} (max_length by variant: "
            f"{limits})\nhint: add a variant without max_length, or shorten the sequences"
        )
    if all(variant.predicted_seconds > 0 for variant in fitting):
        return min(fitting, key=lambda variant: variant.seconds(health)).name
    return min(fitting, key=_tightness).name


def _tightness(variant: VariantFacts) -> float:
    return float("inf") if variant.max_length is None else variant.max_length
