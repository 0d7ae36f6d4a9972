"""What a plan is made for, besides model and devices, and which plans have been made: the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hetu_fx.plans.plan import Plan

NEAR = 0.05
"""Measured rates that differ by less than this are one situation: nearer than that, noise tells them apart."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The devices' straggling rates, of those that are not 1, and the devices that are drained."""

    rates: tuple[tuple[int, float], ...] = ()
    drained: frozenset[int] = frozenset()

    @classmethod
    def of(cls, rates: Mapping[int, float], drained: Collection[int] = ()) -> Situation:
        """Return the situation of some rates, those of drained devices left out."""
        slow = ((rank, rate) for rank, rate in sorted(rates.items()) if rate != 1.0 and rank not in drained)
        return cls(tuple(slow), frozenset(drained))

    @property
    def name(self) -> str:
        """Return a name that is fit for a file: `slow-1x2.5` where device 1 takes 2.5 times as long.

        Devices that are left out stand first: `without-3-slow-1x2.5`.
        """
        left_out = ["without", *map(str, sorted(self.drained))] if self.drained else []
        slow = [f"{rank}x{rate:.3g}" for rank, rate in self.rates]
        return "-".join([*left_out, *(["slow", *slow] if slow else [])]) or "healthy"

    def distance(self, other: Situation) -> float:
        """Return by how much the rates of one device differ at most; infinite if other devices are slow or drained."""
        mine, theirs = dict(self.rates), dict(other.rates)
        if mine.keys() != theirs.keys() or self.drained != other.drained:
            return float("inf")
        return max((max(rate / theirs[rank], theirs[rank] / rate) - 1 for rank, rate in mine.items()), default=0.0)


@dataclass
class PlanBook:
    """The plans that have been made, by situation."""

    plans: dict[Situation, Plan] = field(default_factory=dict)

    def nearest(self, situation: Situation) -> Situation | None:
        """Return the situation with a plan that is this one, as far as can be measured; None if there is none."""
        near = min(self.plans, key=situation.distance, default=None)
        return None if near is None or situation.distance(near) >= NEAR else near
