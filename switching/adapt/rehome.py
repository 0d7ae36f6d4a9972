"""Where parameters live is changed while they train: near another plan, on other devices, away from one that leaves.

What the change moves is decided by `migrate.plan` and done by `migrate.migrate`; here is decided where homes
are to be, and which devices plans may use.

After devices are lost, what they held comes from others that hold the same, as in Hetu v2's elastic training (section
9): states are whole on each replica (zero 0), so that a replica that has lost none of its devices has all of them.
`hetu_fx.planner.search.staying` prices the same.

Homes follow plans: when devices' rates have led to another one, parameters and their state move near it, if it pays. A
plan alone leaves homes where they are, and a device that has become slow goes on updating what it owns, summing its
gradients and giving its values to the others. Here is decided whether to change that, and when: after the first step
under the plan, which has told where it reads what, so that nothing is deduced for it twice. Malleus moves the state
with every plan.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import FrameType

import torch

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.states import Duplicate
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import (
    StepFacts,
    all_gather_object,
    any_rank,
    broadcast_from_rank0,
    raise_on_all_ranks,
)
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import PlanError, StateError
from hetu_fx.planner.price.step_end import (
    ParameterHome,
    home_end_seconds,
    move_seconds,
    owned_bytes,
    update_seconds_per_byte,
)
from hetu_fx.plans.homes import choose_homes, home_weights
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.adapt.adaptation import Adaptation
from hetu_fx.switching.adapt.health import UpdateTimes
from hetu_fx.switching.bridge.bridge_plan import BridgeEntry
from hetu_fx.switching.migrate.move_plan import SwitchPlan
from hetu_fx.switching.migrate.state_tensors import TrainingState, check_optimizers, with_layout
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.step.timer import find_clock

_log = logging.getLogger("hetu_fx.home")

Home = Plan | str | Sequence[int] | Mapping[int, float]
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


class Rehoming:
    """Changes homes between steps, drains devices and admits them again. All methods are collective.

    Args:
        runtime: what runs.
        adaptation: plans anew, where it can.
        optimizers: known from the start; others become known when they are passed.
    """

    def __init__(
        self, runtime: Runtime, adaptation: Adaptation, optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        self.runtime, self.adaptation = runtime, adaptation
        self.optimizers: list[torch.optim.Optimizer] = list(optimizers)
        self.homes_follow = runtime.settings.options.homes_follow
        self.is_told = bool(optimizers)
        self._chosen: dict[tuple[Plan, tuple[float, ...]], dict[str, Annotation]] = {}
        self._has_signal = False

    def switch_home(
        self, home: Home, optimizer: Optimizers | None = None, *, overlap: bool | None = None
    ) -> SwitchPlan:
        """Bring parameters and all that belongs to them home to where `home` says; see `Handle.switch_home`.

        Homes follow no plans from now on: the user has said where they are to be.
        """

        def wanted() -> tuple[Plan, list[float]]:
            self._take_in(optimizer)
            return self._wanted(home)

        done = self._carry_out(*raise_on_all_ranks(self.runtime.table, wanted), overlap)
        self.homes_follow = False
        return done

    @property
    def weights(self) -> list[float]:
        """Return what each rank is to have of the homes, if nobody says otherwise: by the plan, or by speed now."""
        cluster, world = self.adaptation.cluster, self.runtime.table.size
        now = None if cluster is None else cluster.with_rates(self.runtime.variants.health.rates)
        plan, drained = self.runtime.variants[self.runtime.current].plan, self.runtime.variants.drained
        return [0.0 if rank in drained else one for rank, one in enumerate(home_weights(plan, now, world))]

    def drain(self, ranks: Sequence[int], optimizer: Optimizers | None = None) -> SwitchPlan:
        """Take devices out of all work and of all homes; see `Handle.drain`."""
        self._learn(optimizer)
        drained = raise_on_all_ranks(self.runtime.table, lambda: self._drained_with(ranks))
        return self._change_devices(drained, overlap=False)  # its process may end as soon as this returns

    def admit(
        self, ranks: Sequence[int], optimizer: Optimizers | None = None, *, overlap: bool | None = None
    ) -> SwitchPlan:
        """Give drained devices work and homes again; see `Handle.admit`."""
        self._learn(optimizer)
        drained = raise_on_all_ranks(self.runtime.table, lambda: self._drained_without(ranks))
        return self._change_devices(drained, overlap)

    def drain_on_sigterm(self, optimizer: Optimizers | None = None) -> None:
        """Drain this process's device before the first step after a SIGTERM; see `Handle.drain_on_sigterm`."""
        self._learn(optimizer)
        raise_on_all_ranks(self.runtime.table, self._listen)

    def tell(self) -> dict[str, float]:
        """Say whether this rank asks to be drained."""
        return {"leaving": self._has_signal}

    def observe(self, facts: StepFacts) -> None:
        """Drain the devices that have asked for it, unless that would be all."""
        leaving = [rank for rank in facts.leaving if rank not in self.runtime.variants.drained]
        if len(leaving) + len(self.runtime.variants.drained) == self.runtime.table.size:
            _log.warning("all devices are to be drained, so none is; save a checkpoint and end the job")
        elif leaving:
            _log.info("devices %s have had SIGTERM: %s", leaving, self.drain(leaving).summary())

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise StateError("drain_on_sigterm must be called in the main thread, as signals arrive there")
        before = signal.getsignal(signal.SIGTERM)

        def ask(number: int, frame: FrameType | None) -> None:
            self._has_signal = True
            signal.signal(signal.SIGTERM, before)  # the second one is not for us

        signal.signal(signal.SIGTERM, ask)

    def _learn(self, optimizer: Optimizers | None) -> None:
        """Remember optimizers; refuse to go on without knowing of any, as their state would stay behind."""
        raise_on_all_ranks(self.runtime.table, lambda: self._take_in(optimizer))

    def _take_in(self, optimizer: Optimizers | None) -> None:
        if optimizer is None and not self.is_told:
            raise StateError(
                "the optimizer's state must move with the parameters, but no optimizer is known\n"
                "hint: pass optimizer=... here or to hetu_fx.auto_parallelize (several as a list; () if there is none)"
            )
        if optimizer is None:
            return
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        check_optimizers(self.runtime.homes, given)
        self.is_told = True
        self.optimizers += [new for new in given if all(new is not known for known in self.optimizers)]

    def _wanted(self, home: Home) -> tuple[Plan, list[float]]:
        """Return the plan near which homes are to be, and what each rank is to have of them."""
        known = self.weights
        match home:
            case Plan():
                self.runtime.execution.check(home, self.runtime.table.size)
                return home, known
            case str():
                return self.runtime.variants.known(home).plan, known
            case Mapping():
                return self._near, [float(home.get(rank, 0.0)) for rank in self._in_world(home)]
            case ranks:
                wanted = self._in_world(ranks)
                return self._near, [known[rank] if rank in set(ranks) else 0.0 for rank in wanted]

    def _in_world(self, ranks: Iterable[int]) -> range:
        """Return all ranks, of which the given ones must be some."""
        given, world = list(ranks), range(self.runtime.table.size)
        if not given or any(type(rank) is not int or rank not in world for rank in given):
            raise StateError(f"homes are asked for on devices {given}\nhint: give some of 0 to {len(world) - 1}")
        return world

    @property
    def _near(self) -> Plan:
        """Return the plan near which homes are, if none is given: what runs now, if it may run on."""
        usable = self.runtime.variants.usable
        current = self.runtime.variants[self.runtime.current]
        return usable.get(self.runtime.current, next(iter(usable.values()), current)).plan

    def _carry_out(self, plan: Plan, weights: Sequence[float], overlap: bool | None) -> SwitchPlan:
        runtime = self.runtime
        shapes = {name: tuple(home.shape) for name, home in runtime.homes.items()}
        left = [0.0 if rank in runtime.variants.drained else weight for rank, weight in enumerate(weights)]
        _check_alike(all_gather_object(runtime.table, (plan.summary(), left)))

        def chosen() -> dict[str, Annotation]:
            if not any(left):
                raise PlanError(f"homes are asked for with shares {list(weights)}, but no device with one is left")
            key = plan, tuple(left)
            if key not in self._chosen:
                self._chosen[key] = choose_homes(plan, runtime.execution.compute_annotations(plan), shapes, left)
            return self._chosen[key]

        done = runtime.switch_home(broadcast_from_rank0(runtime.table, chosen), self.optimizers, overlap)
        _log.info("homes are near %s: %s", plan.summary(), done.summary())
        return done

    def _drained_with(self, ranks: Sequence[int]) -> frozenset[int]:
        drained = self.runtime.variants.drained.union(ranks)
        again = self.runtime.variants.drained.intersection(ranks)
        self._in_world(ranks)
        if again:
            raise StateError(f"devices {sorted(again)} are drained already\nhint: model.hetu.admit takes them back")
        if len(drained) == self.runtime.table.size:
            raise StateError(
                f"draining devices {list(ranks)} would leave none\nhint: save a checkpoint and end the job"
            )
        return drained

    def _drained_without(self, ranks: Sequence[int]) -> frozenset[int]:
        strangers = set(ranks) - self.runtime.variants.drained
        if strangers or not ranks:
            raise StateError(
                f"devices {list(ranks)} cannot be admitted: drained are {sorted(self.runtime.variants.drained)}"
            )
        return self.runtime.variants.drained - set(ranks)

    def _change_devices(self, drained: frozenset[int], overlap: bool | None) -> SwitchPlan:
        """Plan for the devices that are not drained, and bring homes there; if that fails all is as before."""
        runtime, variants = self.runtime, self.runtime.variants
        with variants.draining(drained):
            plan = raise_on_all_ranks(runtime.table, self._replanned)
            runtime.buffers.sync()
            done = self._carry_out(plan, self.weights, overlap)
        if variants.pinned not in {*variants.usable, None}:
            _log.info("variant %r uses drained devices; the policy chooses again", variants.pinned)
            variants.pin(None)
        return done

    def _replanned(self) -> Plan:
        """Return a plan for the devices there are: a new one where devices are known, else that of most devices."""
        if self.adaptation.cluster is None:
            usable = self.runtime.variants.usable.values()
            return max((v.plan for v in usable), key=lambda plan: len(plan.devices), default=self._near)
        return self.runtime.variants[self.adaptation.replan(self.runtime.variants.health.rates)].plan


def _check_alike(asked: Sequence[tuple[str, list[float]]]) -> None:
    """Refuse what ranks ask for unlike: near which plan, and which shares."""
    if any(one != asked[0] for one in asked):
        told = "; ".join(f"rank {rank}: near {near}, shares {shares}" for rank, (near, shares) in enumerate(asked))
        raise StateError(f"ranks ask for different homes ({told})\nhint: make the same call on all ranks")


def move_homes_near(
    runtime: Runtime, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], lost: Collection[int]
) -> SwitchPlan:
    """Bring parameters and all that belongs to them home near a plan; lost devices give nothing. Collective.

    Raises StateError, on every rank, where nobody else has what a lost device held.
    """
    table, topology = runtime.table, runtime.table.topology
    raise_on_all_ranks(table, lambda: _leave_out(TrainingState(runtime.homes, optimizers), lost, table))
    shapes = {name: tuple(home.shape) for name, home in runtime.homes.items()}
    known = home_weights(plan, topology if isinstance(topology, Cluster) else None, table.size)
    weights = [0.0 if rank in lost else speed for rank, speed in enumerate(known)]
    near = broadcast_from_rank0(
        table, lambda: choose_homes(plan, runtime.execution.compute_annotations(plan), shapes, weights)
    )
    return runtime.switch_home(near, optimizers, overlap=False)


def _leave_out(state: TrainingState, lost: Collection[int], table: GroupTable) -> None:
    """Forget what lost devices, and those that hold a tensor together with them, hold of it."""
    for (name, _), tensor in state.tensors.items():
        before = tensor.home_layout.annotation
        if not set(lost).isdisjoint(before.ranks):
            left = surviving_home(name, before, lost)
            with_layout(tensor, tensor.local if left.holds(table.rank) else None, left, table)


def surviving_home(name: str, home: Annotation, lost: Collection[int]) -> Annotation:
    """Return where a tensor is that was at home there, after devices are lost: the groups that have lost none.

    Raises StateError where they do not have all of it.
    """
    pairs = zip(home.groups, home.shardings, strict=True)
    whole = [(group, sharding) for group, sharding in pairs if set(lost).isdisjoint(group.ranks)]
    if not whole or not isinstance(home.top, Duplicate):
        raise StateError(
            f"devices {sorted(lost)} are lost, and nobody else has all of {name!r}, which was at home on ranks "
            f"{sorted(home.ranks)}\nhint: train with zero=0 on several replicas, or load a checkpoint"
        )
    groups, shardings = zip(*whole, strict=True)
    return Annotation(groups, shardings, Duplicate(len(groups)) if len(groups) > 1 else None)


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
