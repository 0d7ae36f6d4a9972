"""Homes follow plans: when devices' rates have led to another one, parameters and their state move near it, if it pays.

A plan alone leaves homes where they are, and a device that has become slow goes on updating what it owns, summing its
gradients and giving its values to the others. Here is decided whether to change that, and when: after the first step
under the plan, which has told where it reads what, so that nothing is deduced for it twice. Malleus moves the state
with every plan.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import StepFacts, any_rank, raise_on_all_ranks
from hetu_fx.planner.price.step_end import (
    ParameterHome,
    home_end_seconds,
    move_seconds,
    owned_bytes,
    update_seconds_per_byte,
)
from hetu_fx.plans.homes import choose_homes
from hetu_fx.switching.adapt.adaptation import Adaptation
from hetu_fx.switching.adapt.own_times import UpdateTimes
from hetu_fx.switching.adapt.rehome import Rehoming
from hetu_fx.switching.bridge.bridge_plan import BridgeEntry
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.step.timer import find_clock

_log = logging.getLogger("hetu_fx.home")

LEAST_GAIN = 0.01
"""Homes move if that makes a step shorter by at least so much: what updates take is measured, and so is noisy."""

MOVE_SECONDS = 0.1
"""What a move takes whatever travels: its plan, and ways from the new homes to graphs."""

RECENT_STEPS = 5
"""An update takes what it took in the median of so many steps: rates are told by as many."""

STAY_STEPS = 30
"""So many steps homes stay after they have followed a plan; within these a move must have paid for itself."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of a move of homes, at the devices' rates now.

    Attributes:
        step_seconds: of a step under the plan that runs; 0 if nobody has predicted it.
        stay_seconds: of the end of a step with homes as they are.
        follow_seconds: of the end of a step with homes near the plan.
        move_seconds: of the move.
    """

    step_seconds: float
    stay_seconds: float
    follow_seconds: float
    move_seconds: float

    @property
    def gain_seconds(self) -> float:
        """Return what a step becomes shorter by."""
        return self.stay_seconds - self.follow_seconds

    @property
    def pays(self) -> bool:
        """Tell whether the move shortens steps by what can be predicted, and is paid for while homes stay."""
        least = LEAST_GAIN * self.step_seconds
        return self.gain_seconds > least and self.gain_seconds * STAY_STEPS > self.move_seconds

    def __str__(self) -> str:
        gain, step = self.gain_seconds, self.step_seconds
        return f"{gain:.2g} s less of a step of {step:.2g} s, for a move of {self.move_seconds:.2g} s"


def parameter_homes(entries: Sequence[BridgeEntry]) -> list[ParameterHome]:
    """Return where parameters are at home, and where they are read."""
    return [ParameterHome(entry.shape, entry.dtype.itemsize, entry.home, entry.compute) for entry in entries]


def outlook(
    entries: Sequence[BridgeEntry],
    targets: Mapping[str, Annotation],
    step_seconds: float,
    cluster: Cluster,
    updates: Mapping[int, float],
) -> Outlook:
    """Return what is expected of a move to `targets`; a pure function.

    `updates` are the seconds that devices took for an update with homes as they are, as far as they are known.
    """
    stay = parameter_homes(entries)
    follow = [replace(one, home=targets[entry.name]) for one, entry in zip(stay, entries, strict=True)]
    moved = [replace(one, read=targets[entry.name]) for one, entry in zip(stay, entries, strict=True)]
    per_byte = update_seconds_per_byte(updates, owned_bytes(stay), cluster)
    stays, follows = (home_end_seconds(homes, cluster, per_byte) for homes in (stay, follow))
    return Outlook(step_seconds, stays, follows, MOVE_SECONDS + move_seconds(moved, cluster))


class HomesFollow:
    """Moves homes near the plan that runs, once another one has been made for the devices' rates.

    Whether homes may follow says `rehoming.homes_follow`. All ranks decide by what they have agreed on.

    Args:
        runtime: what runs; steps are observed from now on.
        adaptation: makes the plans.
        rehoming: knows the optimizers, and what each device is to have.
    """

    def __init__(self, runtime: Runtime, adaptation: Adaptation, rehoming: Rehoming) -> None:
        self.runtime, self.adaptation, self.rehoming = runtime, adaptation, rehoming
        self._due_after: int | None = None
        self._stay_until = 0
        self._has_told = False
        self._times = UpdateTimes(find_clock(next(runtime.model.parameters()).device))
        self._updates: dict[int, deque[float]] = {}
        self._events_seen = 0
        self._changes = 0

    def tell(self) -> dict[str, float]:
        """Say what this rank's last update took; 0 if it has made none since the last facts.

        Alone it does not ask, for which it would wait for its device: there is nowhere to move to.
        """
        if self.runtime.table.size == 1:
            return {}
        self._times.time_steps_of(self.rehoming.optimizers)
        return {"update_seconds": self._times.taken()}

    def observe(self, facts: StepFacts) -> None:
        """Move the homes if a plan has taken over, has run a step, and the move pays; collective then."""
        self._take_in(facts.update_seconds)
        if self.adaptation.cluster is None:
            return  # nothing is known of the devices, and so no plan is made for their rates
        if len(self.adaptation.changes) > self._changes:
            self._changes, self._due_after = len(self.adaptation.changes), self.adaptation.changes[-1].step
        if not self.rehoming.homes_follow:
            self._due_after = self.runtime.step  # homes that are handed back are looked at anew
        if self._is_due and self._has_optimizers() and not self._must_wait():
            self._due_after = None
            self._decide()

    def _take_in(self, updates: Sequence[float]) -> None:
        """Remember what the last updates took with homes as they are."""
        for rank, seconds in enumerate(updates):
            if seconds:
                self._updates.setdefault(rank, deque(maxlen=RECENT_STEPS)).append(seconds)
        events = self.runtime.in_flight.events.since(self._events_seen)
        self._events_seen += len(events)
        if any(event.event == "moved" for event in events):
            self._updates.clear()

    @property
    def _is_due(self) -> bool:
        step, due_after = self.runtime.step, self._due_after
        has_run = due_after is not None and step > due_after
        return (
            has_run and step >= self._stay_until and self.runtime.variants.pinned is None and self.rehoming.homes_follow
        )

    def _has_optimizers(self) -> bool:
        """Tell whether it is known what is to move with the parameters; say once how it would be."""
        if not self.rehoming.is_told and not self._has_told:
            _log.info(
                "homes stay where they are, as no optimizer is known whose state is to move with them: pass "
                "optimizer=... to hetu_fx.auto_parallelize, and homes follow plans for slow devices"
            )
        self._has_told = True
        return self.rehoming.is_told

    def _must_wait(self) -> bool:
        """Tell whether a rank awaits a backward, or keeps nothing that tells where the plan reads; collective."""
        return any(any_rank(self.runtime.table, [self.runtime.awaits_backward, not self._entries]))

    @property
    def _entries(self) -> tuple[BridgeEntry, ...]:
        return self.runtime.variants[self.runtime.current].compute.entries

    def _decide(self) -> None:
        runtime = self.runtime
        targets, expected = raise_on_all_ranks(runtime.table, self._expected)
        if not expected.pays:
            _log.info("homes stay where they are: %s", expected)
            return
        self._stay_until = runtime.step + STAY_STEPS
        rates = dict(runtime.variants.health.rates)
        why = f"follows {runtime.current!r}, rates {rates}: {expected}"
        done = runtime.switch_home(targets, self.rehoming.optimizers, why=why)
        _log.info("homes follow %r (%s): %s", runtime.current, expected, done.summary())

    def _expected(self) -> tuple[dict[str, Annotation], Outlook]:
        """Return where homes would be near the plan that runs, and what that is expected to bring."""
        variant = self.runtime.variants[self.runtime.current]
        homes, read = self.runtime.homes, {entry.name: entry.compute for entry in self._entries}
        shapes = {name: tuple(home.shape) for name, home in homes.items()}
        targets = choose_homes(variant.plan, read, shapes, self.rehoming.weights)
        updates = {rank: median(seconds) for rank, seconds in self._updates.items()}
        return targets, outlook(self._entries, targets, variant.predicted_seconds, self._cluster, updates)

    @property
    def _cluster(self) -> Cluster:
        assert self.adaptation.cluster is not None, "plans are made for known devices alone"
        return self.adaptation.cluster.with_rates(self.runtime.variants.health.rates)
